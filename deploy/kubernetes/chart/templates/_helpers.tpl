{{- define "async-rl.labels" -}}
app.kubernetes.io/name: async-rl
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "async-rl.metadata-labels" -}}
{{ include "async-rl.labels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "async-rl.claim" -}}
{{ .Values.storage.existingClaim | default (printf "%s-runs" .Release.Name) }}
{{- end }}

{{/* Another config is another object: a trainer that is started again reads the one that it began with. */}}
{{- define "async-rl.config" -}}
{{ .Release.Name }}-config-{{ .Values.run.config | sha256sum | trunc 8 }}
{{- end }}

{{- define "async-rl.secret" -}}
{{ .Values.token.existingSecret | default (printf "%s-token" .Release.Name) }}
{{- end }}

{{/* The environment of a container: dict "root" $ "env" (of the pool) "fields" (of the pod, optional). Kubernetes
expands $(NAME) in commands. */}}
{{- define "async-rl.env" -}}
{{- range $name, $path := merge (dict "POD_NAME" "metadata.name") (.fields | default dict) }}
- name: {{ $name }}
  valueFrom: {fieldRef: {fieldPath: {{ $path | quote }}}}
{{- end }}
- name: ASYNC_RL_TOKEN
  valueFrom: {secretKeyRef: {name: {{ include "async-rl.secret" .root | quote }}, key: {{ .root.Values.token.key | quote }}}}
# Caches are written below it; the root file system is read-only.
- {name: HOME, value: /tmp}
{{- range $name, $value := .env }}
- {name: {{ $name | quote }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}

{{- define "async-rl.container-security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* dict "root" $ "readsOnly" (optional): an instance reads the model and snapshots alone, and writes nothing. */}}
{{- define "async-rl.mounts" -}}
{{- if not .readsOnly }}
- {name: config, mountPath: /etc/async-rl, readOnly: true}
{{- end }}
- {name: runs, mountPath: {{ .root.Values.storage.mountPath | quote }}, readOnly: {{ .readsOnly | default false }}}
- {name: tmp, mountPath: /tmp}
- {name: shm, mountPath: /dev/shm}
{{- with .root.Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* What the pods of a pool have in common: dict "root" $ "pool" (training or instances) "usesApi" and "readsOnly"
(optional). */}}
{{- define "async-rl.pod" -}}
automountServiceAccountToken: {{ .usesApi | default false }}
enableServiceLinks: false
terminationGracePeriodSeconds: {{ .pool.gracePeriodSeconds }}
securityContext: {{ toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- with .pool.schedulerName }}
schedulerName: {{ . | quote }}
{{- end }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .pool.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .pool.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .pool.affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
volumes:
{{- if not .readsOnly }}
  - {name: config, configMap: {name: {{ include "async-rl.config" .root }}}}
{{- end }}
  - {name: runs, persistentVolumeClaim: {claimName: {{ include "async-rl.claim" .root | quote }}}}
  - {name: tmp, emptyDir: {}}
  - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ .pool.shmSize | quote }}}}
{{- with .root.Values.extraVolumes }}
{{ toYaml . | indent 2 }}
{{- end }}
{{- end }}

{{/* A container without its probes: dict "root" $ "pool" "name" "image" "command" "ports", "readsOnly" and
"fields" (optional). */}}
{{- define "async-rl.container" -}}
name: {{ .name }}
image: {{ .image | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
{{- with .command }}
# The words are those of the run's plan, after the image's entry point.
args: {{ toYaml . | nindent 2 }}
{{- end }}
workingDir: {{ .root.Values.storage.mountPath | quote }}
env: {{ include "async-rl.env" (dict "root" .root "env" .pool.env "fields" .fields) | nindent 2 }}
{{- with .root.Values.envFrom }}
envFrom: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .ports }}
ports:
{{- range $name, $port := . }}
  - {name: {{ $name }}, containerPort: {{ $port }}}
{{- end }}
{{- end }}
resources: {{ toYaml .pool.resources | nindent 2 }}
securityContext: {{ include "async-rl.container-security" .root | nindent 2 }}
volumeMounts: {{ include "async-rl.mounts" . | nindent 2 }}
{{- end }}

{{/* A pod of Ray: the operator adds the command that starts Ray. dict "root" $ "pool" "name" "ports". */}}
{{- define "async-rl.ray-container" -}}
{{- include "async-rl.container" (merge (dict "image" .root.Values.image.trainer "command" list) .) }}
{{- end }}

{{- define "async-rl.instance-pod" -}}
metadata:
  labels: {{ include "async-rl.labels" . | nindent 4 }}
    app.kubernetes.io/component: instance
  {{- with .Values.instances.annotations }}
  annotations: {{ toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "async-rl.pod" (dict "root" . "pool" .Values.instances "readsOnly" true) | nindent 2 }}
  containers:
    - {{ include "async-rl.container" (dict "root" . "pool" .Values.instances "name" "instance" "readsOnly" true "image" .Values.image.instance "command" .Values.instances.command "ports" (dict "http" .Values.instances.port)) | nindent 6 | trim }}
      # /health answers as soon as the engine does, with or without weights of the run.
      startupProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ div (add .Values.instances.startSeconds 4) 5 }}
      readinessProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 5
        timeoutSeconds: 5
      livenessProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: 6
{{- end }}

{{/* Words as a line of a shell. */}}
{{- define "async-rl.shell-words" -}}
{{- range $i, $word := . }}{{ if $i }} {{ end }}'{{ replace "'" "'\\''" $word }}'{{ end }}
{{- end }}
