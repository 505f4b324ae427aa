"""Weights from a real sender in the test process: in service only when whole, and never beside stale caches (I5)."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from async_rl.errors import PublishError
from async_rl.shared.weights.snapshot import SnapshotWriter

pytestmark = pytest.mark.distributed

# Two pages of the prefix cache and a rest.
PROMPT = [2 + i % 90 for i in range(70)]


@pytest.fixture(scope="module")
def server(launch_instance: Callable[..., Any], tiny_model: Callable[..., Path]) -> Any:
    return launch_instance(tiny_model("qwen3", tied=True))


@pytest.fixture(scope="module")
def models(tiny_model: Callable[..., Path], load_reference: Callable[[Path], torch.nn.Module]) -> list[torch.nn.Module]:
    return [load_reference(tiny_model("qwen3", tied=True, seed=seed)) for seed in range(3)]


@pytest.fixture
def trainer(server: Any, trainer_side: Any, models: list[torch.nn.Module]) -> Iterator[Any]:
    yield trainer_side([server])
    if server.client.get("/health").status_code == 200:
        server.post("/resume")


def assert_serves(
    instance: Any, model: torch.nn.Module, version: str, reference: Callable[..., list[float]], n: int = 4
) -> None:
    for choice in instance.generate(PROMPT, n=n, max_tokens=20, temperature=0.8)["choices"]:
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert logprobs == pytest.approx(reference(model, PROMPT, choice["token_ids"], 0.8), abs=1e-4)
        assert {span["version"] for span in choice["weight_versions"]} == {version}
    assert instance.client.get("/weight_info").json() == {"weight_version": version}


def assert_error(instance: Any, path: str, body: object, status: int, *words: str) -> None:
    message = instance.post(path, body, status)["error"]["message"]
    assert all(word in message for word in words), message


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_after_an_update_nothing_comes_from_old_weights_or_caches(
    server: Any, trainer: Any, models: list[torch.nn.Module], reference: Callable[..., list[float]], mode: str
) -> None:
    server.generate(PROMPT, n=4, max_tokens=20)
    for step in (1, 2):
        version = f"{mode}-{step}"
        fingerprint = trainer.publish(models[step], version, mode)
        rpc = {"method": "weight_fingerprint"}
        assert server.post("/collective_rpc", rpc) == {"results": [fingerprint]}
        # The prompt's pages were in the prefix cache under the former weights.
        assert_serves(server, models[step], version, reference)


def test_kept_request_goes_on_with_the_new_weights_and_says_so(
    server: Any, trainer: Any, models: list[torch.nn.Module], reference: Callable[..., list[float]]
) -> None:
    trainer.publish(models[1], "kept-1")
    before = server.metric("vllm:generation_tokens_total")
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(server.generate, PROMPT, n=32, max_tokens=180, ignore_eos=True)
        while server.metric("vllm:generation_tokens_total") < before + 64:
            time.sleep(0.01)
        trainer.publish(models[2], "kept-2")
        choices = call.result()["choices"]
    for choice in choices:
        old, new = choice["weight_versions"]
        assert (old["version"], new["version"]) == ("kept-1", "kept-2")
        assert 0 == old["start"] < old["end"] == new["start"] < new["end"] == 180
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        cut = old["end"]
        tokens = choice["token_ids"]
        assert logprobs[:cut] == pytest.approx(reference(models[1], PROMPT, tokens)[:cut], abs=1e-4)
        assert logprobs[cut:] == pytest.approx(reference(models[2], PROMPT, tokens)[cut:], abs=1e-4)


def test_generation_waits_while_an_update_goes_on(
    server: Any, trainer: Any, models: list[torch.nn.Module], reference: Callable[..., list[float]]
) -> None:
    server.post("/pause")
    server.post("/start_weight_update")
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(assert_serves, server, models[1], "waited", reference)
        trainer.send(trainer.stream(models[1]))
        assert server.client.get("/health").status_code == 200
        assert_error(server, "/resume", {}, 400, "finish")
        assert not call.done()
        server.post("/finish_weight_update", {"weight_version": "waited"})
        server.post("/resume")
        call.result()


def test_several_streams_make_one_update(
    server: Any, trainer: Any, models: list[torch.nn.Module], reference: Callable[..., list[float]]
) -> None:
    stream = trainer.stream(models[2])
    server.post("/pause")
    server.post("/start_weight_update")
    trainer.send(stream[:7])
    trainer.send(stream[7:])
    server.post("/finish_weight_update", {"weight_version": "parts"})
    server.post("/resume")
    assert_serves(server, models[2], "parts", reference)


def test_start_needs_a_pause_and_no_other_update(server: Any, trainer: Any) -> None:
    assert_error(server, "/start_weight_update", {}, 400, "/pause")
    server.post("/pause")
    server.post("/start_weight_update")
    assert_error(server, "/start_weight_update", {}, 500, "already")
    # Nothing was received: the old weights are whole, and an error says that there is no new version.
    assert_error(server, "/finish_weight_update", {"weight_version": "never"}, 500, "old ones")
    assert server.client.get("/weight_info").json()["weight_version"] != "never"
    assert server.client.get("/health").status_code == 200


def test_refused_streams_change_nothing(
    server: Any, trainer: Any, models: list[torch.nn.Module], reference: Callable[..., list[float]]
) -> None:
    trainer.publish(models[1], "sound")
    server.post("/pause")
    server.post("/start_weight_update")
    good = trainer.update_info(trainer.stream(models[2]))["update_info"]
    norm = good["names"].index("model.norm.weight")

    def refused(*words: str, **changes: object) -> None:
        assert_error(server, "/update_weights", {"update_info": {**good, **changes}}, 400, *words)

    def changed(key: str, value: object) -> dict[str, object]:
        return {key: [*good[key][:norm], value, *good[key][norm + 1 :]]}

    refused("model.nothing.weight", **changed("names", "model.nothing.weight"))
    refused("lm_head.weight", "tied", **changed("names", "lm_head.weight"))
    refused("twice", **changed("names", "model.embed_tokens.weight"))
    refused("model.norm.weight", "bfloat16", "float32", **changed("dtype_names", "bfloat16"))
    refused("model.norm.weight", "[31]", "[32]", **changed("shapes", [31]))
    refused("equal lengths", shapes=good["shapes"][1:])
    refused("flush", flush=True)
    others = [0] * (len(good["names"]) - 1)
    refused("stages has 7", "1 weight groups were joined", stages=[*others, 7])
    refused("stages has", "expected the stage of each tensor", stages=others)
    refused("stages", "greater than or equal to 0", stages=[*others, -1])
    assert_error(server, "/finish_weight_update", {"weight_version": "refused"}, 500)
    server.post("/resume")
    assert_serves(server, models[1], "sound", reference)


def test_incomplete_update_takes_the_instance_out_of_service_until_a_full_one(
    server: Any, trainer: Any, models: list[torch.nn.Module], reference: Callable[..., list[float]]
) -> None:
    stream = trainer.stream(models[2])
    server.post("/pause")
    server.post("/start_weight_update")
    trainer.send(stream[:-1])
    assert_error(server, "/finish_weight_update", {"weight_version": "part"}, 500, "model.norm.weight")
    assert_out_of_service(server)
    server.post("/resume")
    assert_out_of_service(server)
    trainer.publish(models[2], "whole")
    assert_serves(server, models[2], "whole", reference)


def assert_out_of_service(server: Any) -> None:
    health = server.client.get("/health")
    assert health.status_code == 503 and "full weight update" in health.json()["error"]["message"]
    assert health.json()["error"]["param"] == "weights", "what a trainer that is about to publish goes by"
    assert_error(server, "/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {}}, 503)


def test_stream_that_breaks_takes_the_instance_out_of_service_until_a_full_update(
    server: Any, trainer: Any, trainer_side: Any, models: list[torch.nn.Module], reference: Callable[..., list[float]]
) -> None:
    with ThreadPoolExecutor(1) as threads:
        frozen = threads.submit(
            server.post,
            "/inference/v1/generate",
            {"token_ids": PROMPT, "sampling_params": {"n": 16, "max_tokens": 180, "ignore_eos": True}},
            503,
        )
        while server.metric("vllm:num_requests_running") < 16:
            time.sleep(0.01)
        server.client.post("/pause", params={"mode": "keep"}).raise_for_status()
        server.post("/start_weight_update")
        stream = trainer.stream(models[2])
        (call,) = trainer.call_update(stream, status=500)

        def until_it_dies() -> Iterator[Any]:
            yield from stream[:5]
            trainer.die()
            yield from stream[5:]

        with pytest.raises(PublishError, match="the weight broadcast broke"):
            trainer.group.send(until_it_dies(), 1_000)
        assert "broke" in call.result()["error"]["message"]
        frozen.result()
    assert_out_of_service(server)
    assert_error(server, "/update_weights", trainer.update_info(stream), 500)
    fresh = trainer_side([server])
    assert_out_of_service(server)
    fresh.publish(models[1], "recovered")
    assert_serves(server, models[1], "recovered", reference)


def test_silent_sender_ends_in_an_error_within_the_timeout(
    server: Any, trainer_side: Any, models: list[torch.nn.Module], reference: Callable[..., list[float]]
) -> None:
    silent = trainer_side([server], timeout_s=5.0)
    server.post("/pause")
    server.post("/start_weight_update")
    (call,) = silent.call_update(silent.stream(models[2]), status=500)
    while not call.done():
        # The server must answer while it waits for weights.
        assert server.client.get("/is_paused").json() == {"is_paused": True}
        time.sleep(0.05)
    assert "broke" in call.result()["error"]["message"]
    assert_out_of_service(server)
    trainer_side([server]).publish(models[1], "after silence")
    assert_serves(server, models[1], "after silence", reference)


def write_snapshot(path: Path, trainer: Any, model: torch.nn.Module) -> tuple[dict[str, Any], str]:
    """The announcement of a snapshot of `model`, and its fingerprint."""
    stream = trainer.stream(model)
    writer = SnapshotWriter(path, [spec for spec, _ in stream])
    fingerprint = writer.write(stream)
    info = trainer.update_info(stream)["update_info"]
    return {"update_info": info | {"snapshot": str(writer.commit())}}, fingerprint


def test_snapshot_needs_no_weight_group_and_leaves_one_as_it_is(
    launch_instance: Callable[..., Any],
    tiny_model: Callable[..., Path],
    server: Any,
    trainer: Any,
    models: list[torch.nn.Module],
    reference: Callable[..., list[float]],
    tmp_path: Path,
) -> None:
    update, fingerprint = write_snapshot(tmp_path / "weights.safetensors", trainer, models[2])
    groupless = launch_instance(tiny_model("qwen3", tied=True))
    for instance in (groupless, server):
        instance.post("/pause")
        instance.post("/start_weight_update")
        instance.post("/update_weights", update)
        instance.post("/finish_weight_update", {"weight_version": "snapshot"})
        instance.post("/resume")
        assert instance.post("/collective_rpc", {"method": "weight_fingerprint"}) == {"results": [fingerprint]}
        assert_serves(instance, models[2], "snapshot", reference)
    # Weights are copies, not views of the file.
    Path(update["update_info"]["snapshot"]).write_bytes(b"")
    assert_serves(groupless, models[2], "snapshot", reference)
    trainer.publish(models[1], "broadcast")
    assert_serves(server, models[1], "broadcast", reference)


def test_snapshot_that_cannot_be_read_changes_nothing(
    server: Any, trainer: Any, models: list[torch.nn.Module], reference: Callable[..., list[float]], tmp_path: Path
) -> None:
    trainer.publish(models[1], "before")
    path = tmp_path / "weights.safetensors"
    update, _ = write_snapshot(path, trainer, models[2])
    server.post("/pause")
    server.post("/start_weight_update")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert_error(server, "/update_weights", update, 400, str(path), "no whole safetensors file")
    path.unlink()
    assert_error(server, "/update_weights", update, 400, str(path), "No such file")
    other = trainer.stream(models[2])[:-1]
    writer = SnapshotWriter(path, [spec for spec, _ in other])
    writer.write(other)
    writer.commit()
    assert_error(server, "/update_weights", update, 400, str(path), "model.norm.weight", "nothing")
    assert_error(server, "/finish_weight_update", {"weight_version": "never"}, 500, "old ones")
    server.post("/resume")
    assert_serves(server, models[1], "before", reference)
    path.write_bytes(whole)
    server.post("/pause")
    server.post("/start_weight_update")
    server.post("/update_weights", update)
    server.post("/finish_weight_update", {"weight_version": "after"})
    server.post("/resume")
    assert_serves(server, models[2], "after", reference)


def test_rendezvous_that_nobody_joins_is_an_error_and_harmless(server: Any, trainer: Any) -> None:
    info = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
    info |= {"secret": "s" * 32, "backend": "sockets", "bucket_bytes": 1000, "timeout_s": 0.5}
    assert_error(server, "/init_weight_transfer_engine", {"init_info": info}, 500, "127.0.0.1:1")
    assert_error(server, "/init_weight_transfer_engine", {"init_info": {**info, "rank_offset": 2}}, 400, "world_size")
    assert server.client.get("/health").status_code == 200


def test_two_instances_take_one_stream(
    server: Any,
    launch_instance: Callable[..., Any],
    trainer_side: Any,
    tiny_model: Callable[..., Path],
    models: list[torch.nn.Module],
    reference: Callable[..., list[float]],
) -> None:
    other = launch_instance(tiny_model("qwen3", tied=True))
    both = trainer_side([server, other])
    fingerprint = both.publish(models[2], "both")
    for instance in (server, other):
        assert instance.post("/collective_rpc", {"method": "weight_fingerprint"}) == {"results": [fingerprint]}
        assert_serves(instance, models[2], "both", reference)
    # Equal weights and equal seeds: equal tokens, whichever instance is asked.
    ask = {"n": 8, "max_tokens": 60, "seed": 7, "ignore_eos": True}
    tokens = [[c["token_ids"] for c in i.generate(PROMPT, **ask)["choices"]] for i in (server, other)]
    assert tokens[0] == tokens[1]


def test_weights_that_give_no_numbers_fail_the_request_not_the_engine(
    server: Any, trainer: Any, models: list[torch.nn.Module], reference: Callable[..., list[float]]
) -> None:
    broken = [(spec, torch.full_like(tensor, torch.nan)) for spec, tensor in trainer.stream(models[0])]
    server.post("/pause")
    server.post("/start_weight_update")
    trainer.send(broken)
    server.post("/finish_weight_update", {"weight_version": "nan"})
    server.post("/resume")
    assert_error(
        server, "/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {"n": 3}}, 500, "not finite"
    )
    trainer.publish(models[1], "healed")
    assert_serves(server, models[1], "healed", reference)
