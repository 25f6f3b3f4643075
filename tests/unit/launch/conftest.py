"""SGLang's own parser of command lines, made once: its import takes seconds."""

import argparse

import pytest


@pytest.fixture(scope="session")
def sglang_parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    return parser
