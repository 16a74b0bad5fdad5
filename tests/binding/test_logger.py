"""Loggers that say a thing once."""

from __future__ import annotations

import logging

import opgraft
import pytest
from opgraft.base.log import logger, silent


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_a_message_is_logged_once_for_equal_arguments(caplog, level: str) -> None:
    """warning_once and its like repeat nothing; other arguments are another message, from the line that logs it."""
    mine = opgraft.init_logger(f"acme.{level}")
    with caplog.at_level(logging.DEBUG, logger="acme"):
        for shape in ([1], [1], [2]):
            getattr(mine, f"{level}_once")("no kernel for %s", shape, scope="local")
    assert [record.getMessage() for record in caplog.records] == [
        "no kernel for [1]",
        "no kernel for [2]",
    ]
    assert {record.levelname for record in caplog.records} == {level.upper()}
    assert {record.filename for record in caplog.records} == {"test_logger.py"}


def test_it_is_the_logger_of_that_name() -> None:
    """init_logger adds to the one logger of a name, so that logging is configured as anywhere."""
    assert opgraft.init_logger("acme") is logging.getLogger("acme") is opgraft.init_logger("acme")
    assert logger is logging.getLogger("opgraft")


def test_silence_ends_as_it_began() -> None:
    """A level below which the program logs nothing holds again after silent()."""
    before = logging.root.manager.disable
    try:
        logging.disable(logging.INFO)
        with silent():
            assert logging.root.manager.disable == logging.CRITICAL
        assert logging.root.manager.disable == logging.INFO
    finally:
        logging.disable(before)
