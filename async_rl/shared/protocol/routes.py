"""Paths, worker methods and headers: vLLM's RL HTTP protocol (0.32), and the fleet endpoint's."""

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
MODELS = "/v1/models"
HEALTH = "/health"
VERSION = "/version"
METRICS = "/metrics"
PAUSE = "/pause"
RESUME = "/resume"
IS_PAUSED = "/is_paused"
SLEEP = "/sleep"
WAKE_UP = "/wake_up"
IS_SLEEPING = "/is_sleeping"
GET_WORLD_SIZE = "/get_world_size"
INIT_WEIGHT_TRANSFER = "/init_weight_transfer_engine"
START_WEIGHT_UPDATE = "/start_weight_update"
UPDATE_WEIGHTS = "/update_weights"
FINISH_WEIGHT_UPDATE = "/finish_weight_update"
WEIGHT_INFO = "/weight_info"
LOAD_ADAPTER = "/v1/load_lora_adapter"
UNLOAD_ADAPTER = "/v1/unload_lora_adapter"
ABORT_REQUESTS = "/abort_requests"
COLLECTIVE_RPC = "/collective_rpc"
SEQUENCE = "/async_rl/sequence"
"""Not of vLLM: our launcher adds it to its server, see `async_rl.shared.protocol.sequence`."""
OPEN_PATHS = (HEALTH, "/ping", METRICS)
"""An instance's paths without a token: those that load balancers and monitors query."""

FINGERPRINT_METHOD = "weight_fingerprint"
"""Worker method behind `/collective_rpc` that returns the fingerprint of the last received weight stream."""

BASE_METHOD = "base_digest"
"""Worker method that returns the digest of the weights below adapters, see `async_rl.shared.weights.fingerprint`."""

ADAPTER_METHOD = "adapter_directory"
"""Worker method of vLLM's servers that returns where the adapters which came last are, on the instance's host."""

OPTIONS_METHOD = "engine_options"
"""Worker method of vLLM's servers that describes their start options that decide how weights are loaded."""

NCCL_METHOD = "nccl_version"
"""Worker method that returns the version of its NCCL and torch (`async_rl.shared.weights.nccl_version`)."""

NOTE_VERSION_METHOD = "note_weight_version"
"""Worker method of servers without weight versions (vLLM 0.23): stores the one given as its only argument."""

NOTED_VERSION_METHOD = "noted_weight_version"
"""Worker method that returns the version noted last; "default" in a new worker."""

FLEET = "/fleet"
FLEET_REGISTER = "/fleet/register"
FLEET_ADD = "/fleet/add"
FLEET_DRAIN = "/fleet/drain"
FLEET_REMOVE = "/fleet/remove"
"""The trainer's own routes, see `rollouts/fleet/`: GET /fleet lists the instances, the others change the fleet."""

BOOT_ID_HEADER = "X-Async-RL-Boot-Id"
"""In every response of the embedded engine's server and of a vLLM that our launcher started: names the process, new
with each start. For other vLLM servers, `process_start_time_seconds` of their /metrics is used."""

BOOT_ID = r"^[A-Za-z0-9-]{1,64}$"
"""What a boot id looks like, in headers and bodies."""

MAX_CONCURRENCY_HEADER = "X-Async-RL-Max-Concurrency"
"""In the same responses: how many responses the engine generates concurrently."""

TERM_HEADER = "X-Async-RL-Term"
"""In every request of a trainer: `RUN_UID:TERM`, the lease on its run's directory (`async_rl.shared.locks.lease`)."""

RUN_HEADER = "X-Async-RL-Run"
"""In requests to a fleet endpoint that was found in a run's directory: the run's uid, as fleet.json has it."""

OTHER_RUN = "run"
"""`param` of a 409: the fleet endpoint is that of another run, whose trainer listens there by now."""

SUPERSEDED_TERM = "term"
"""`param` of a 409: an instance has had a request of the same run with a higher term."""

OWNED_BY_EMBEDDED = "async-rl"
"""`owned_by` of the embedded engine's model card; vLLM's is "vllm"."""

PROTOCOL_VERSION = "0.32.0"
"""The release whose dialect the embedded engine implements; its `/version` reports it, and clients select by it."""

NEEDS_WEIGHTS = "weights"
"""`param` of a 503 of /health: the instance has an incomplete weight update, and serves again after a complete one."""
