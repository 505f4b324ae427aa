// Titles, units and groups of the columns of metrics.jsonl; a column that is not listed is shown under its own name.

export const GROUPS = ["Learning", "Evaluation", "Responses", "Policy", "Optimizer", "Time", "Balance and throughput", "On-policy gaps", "Pool and faults", "Data", "Further"];

const KNOWN = {
  reward_mean: ["Reward, mean", "", "Learning"],
  accuracy: ["Accuracy", "share", "Learning"],
  reward_std: ["Reward, standard deviation", "", "Learning"],
  num_groups_without_signal: ["Groups whose rewards are all equal", "", "Learning"],
  untrained_groups: ["Groups without a gradient", "share", "Learning"],
  reward_mean_drawn: ["Reward of all drawn groups", "", "Learning"],
  response_tokens_mean: ["Response length, mean", "tokens", "Responses"],
  response_tokens_p50: ["Response length, median", "tokens", "Responses"],
  response_tokens_p90: ["Response length, 90% up to", "tokens", "Responses"],
  response_tokens_max: ["Response length, longest", "tokens", "Responses"],
  response_tokens_min: ["Response length, shortest", "tokens", "Responses"],
  truncated_share: ["Rollouts cut at a limit", "share", "Responses"],
  turns_mean: ["Turns per rollout", "", "Responses"],
  branches_mean: ["Branches per rollout", "", "Responses"],
  entropy: ["Entropy", "nats", "Policy"],
  kl: ["KL to the reference", "nats", "Policy"],
  clip_fraction: ["Tokens clipped", "share", "Policy"],
  loss: ["Loss", "", "Optimizer"],
  grad_norm: ["Gradient norm", "", "Optimizer"],
  learning_rate: ["Learning rate", "", "Optimizer"],
  merged_share: ["Values that adapters changed in the publish", "share", "Optimizer"],
  skipped_steps: ["Steps not taken", "", "Optimizer"],
  value_loss: ["Critic's loss", "", "Optimizer"],
  explained_variance: ["Critic's explained variance", "", "Optimizer"],
  critic_grad_norm: ["Critic's gradient norm", "", "Optimizer"],
  seconds: ["Iteration", "s", "Time"],
  wait_s: ["Trainer waits for rollouts", "s", "Time"],
  train_s: ["Forward and backward", "s", "Time"],
  rollout_s: ["Rollouts, first to last", "s", "Time"],
  first_group_s: ["First finished group", "s", "Time"],
  overlap_bound_s: ["Shortest possible iteration", "s", "Time"],
  queue_wait_s_mean: ["Group waits in the queue, mean", "s", "Time"],
  publish_s: ["Publish", "s", "Time"],
  canary_s: ["of which the canary", "s", "Time"],
  step_s: ["Optimizer step", "s", "Time"],
  evaluation_s: ["Training waits for an evaluation", "s", "Time"],
  overlap_efficiency: ["Overlap efficiency", "share", "Balance and throughput"],
  tokens_per_s: ["Throughput", "tokens/s", "Balance and throughput"],
  tpspd: ["Throughput per device", "tokens/s", "Balance and throughput"],
  model_flops: ["Model FLOPs of training", "", "Balance and throughput"],
  mfu: ["Model FLOPs utilization", "share", "Balance and throughput"],
  idle_training: ["Trainer idle", "share", "Balance and throughput"],
  idle_inference: ["Instances idle", "share", "Balance and throughput"],
  desired_instances: ["Instances that would balance the pools", "", "Balance and throughput"],
  num_instances: ["Instances", "", "Balance and throughput"],
  num_training_devices: ["Training devices", "", "Balance and throughput"],
  num_inference_devices: ["Inference devices", "", "Balance and throughput"],
  queue_groups_max: ["Groups in the queue, most", "", "Balance and throughput"],
  logprob_gap_rms: ["Gap, RMS", "nats", "On-policy gaps"],
  max_logprob_gap: ["Gap, largest", "nats", "On-policy gaps"],
  logprob_gap_p99: ["Gap, 99% of tokens below", "nats", "On-policy gaps"],
  logprob_gap_mean: ["Gap, mean", "nats", "On-policy gaps"],
  logprob_gap_mean_abs: ["Gap, mean size", "nats", "On-policy gaps"],
  rollout_kl_k1: ["KL of rollouts to trainer, k1", "nats", "On-policy gaps"],
  rollout_kl_k3: ["KL of rollouts to trainer, k3", "nats", "On-policy gaps"],
  publish_bytes: ["Bytes of a publish", "bytes", "Pool and faults"],
  memory_peak_bytes: ["Host memory, most of a process", "bytes", "Pool and faults"],
  device_memory_peak_bytes: ["Device memory, most of a device", "bytes", "Pool and faults"],
  retries: ["Groups sent again", "", "Pool and faults"],
  num_continued: ["Responses continued elsewhere", "", "Pool and faults"],
  num_resampled: ["Responses sampled again", "", "Pool and faults"],
  num_groups: ["Groups trained", "", "Data"],
  num_left_out: ["Groups left out", "", "Data"],
  prompt_tokens: ["Prompt tokens", "", "Data"],
  response_tokens: ["Response tokens", "", "Data"],
};

const PATTERNS = [
  [/^eval\//, "Evaluation"],
  [/^(reward|accuracy|pass)/, "Learning"],
  [/(response|length|turn|truncated)/, "Responses"],
  [/(entropy|kl|clip|ratio)/, "Policy"],
  [/(grad|loss|value|learning|critic)/, "Optimizer"],
  [/(logprob|gap)/, "On-policy gaps"],
  [/(idle|tokens_per|flops|efficiency|bound|mfu|tpspd|desired|overlap)/, "Balance and throughput"],
  [/_s$/, "Time"],
  [/(bytes|memory|instance|device|retries|fail)/, "Pool and faults"],
  [/^(num_|prompt)/, "Data"],
];

const UNITS = [
  [/_bytes$/, "bytes"],
  [/(_share|_fraction|accuracy|^pass@|\/pass@|^idle_)/, "share"],
  [/tokens_per_s/, "tokens/s"],
  [/_s$/, "s"],
  [/(_tokens|^tokens)/, "tokens"],
  [/(logprob|entropy|(^|_)kl(_|$))/, "nats"],
];

/** A column's title, unit, group, and its place among the others. */
export function describeMetric(name) {
  const place = Object.keys(KNOWN).indexOf(name);
  if (place >= 0) {
    const [title, unit, group] = KNOWN[name];
    return { name, title, unit, group, place };
  }
  const group = PATTERNS.find(([pattern]) => pattern.test(name))?.[1] ?? "Further";
  const unit = UNITS.find(([pattern]) => pattern.test(name))?.[1] ?? "";
  return { name, title: titleOf(name), unit, group, place: Infinity };
}

function titleOf(name) {
  const [head, ...rest] = name.split("/");
  const readable = head.replaceAll("_", " ").replace(/ s$/, "");
  return [readable.charAt(0).toUpperCase() + readable.slice(1), ...rest].join(" / ");
}
