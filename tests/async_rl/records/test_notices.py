import json
import logging
from pathlib import Path

from async_rl.records.notices import MAX_PER_PERIOD, PERIOD_S, recorded_notices
from async_rl.records.run_records import NOTICES
from tests.support.clock import Clock


def texts(run_dir: Path) -> list[str]:
    return [json.loads(line)["text"] for line in (run_dir / NOTICES).read_text().splitlines()]


def test_warnings_of_the_run_are_kept_and_those_of_libraries_are_not(tmp_path: Path) -> None:
    with recorded_notices(tmp_path):
        logging.getLogger("async_rl.rollouts.data.table_files").warning("%d of %d prompts are left out", 2, 9)
        logging.getLogger("trainer.checkpoint").error("two\nlines")
        logging.getLogger("trainer.checkpoint").info("a detail")
        logging.getLogger("torch").warning("deprecated")
        logging.getLogger("trainer.shutdown").error("the run ends: RewardError: shown by the launcher")
    logging.getLogger("trainer").warning("after the run")
    assert texts(tmp_path) == ["2 of 9 prompts are left out", "two\nlines"]


def test_a_place_that_warns_of_every_response_does_not_fill_the_console(tmp_path: Path) -> None:
    clock = Clock()
    with recorded_notices(tmp_path, clock):
        for number in range(100):
            logging.getLogger("async_rl.rollouts.rewards").warning("response %d is late", number)
        clock.sleep(PERIOD_S)
        logging.getLogger("async_rl.rollouts.rewards").warning("another place")
    assert texts(tmp_path) == [*(f"response {number} is late" for number in range(MAX_PER_PERIOD)), "another place"]


def test_a_run_whose_notices_cannot_be_written_goes_on(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("no directory")
    with recorded_notices(tmp_path):
        logging.getLogger("async_rl").warning("nothing happens")
    assert (tmp_path / "logs").read_text() == "no directory"
