"""etcd for the tests of this folder."""

import pytest

from tests.unit.discovery.etcd_server import EtcdServer


@pytest.fixture
def etcd(tmp_path):
    """One for this test."""
    server = EtcdServer(tmp_path)
    yield server
    server.kill()


@pytest.fixture(scope="module")
def shared_etcd(tmp_path_factory):
    """One for a module whose tests keep apart by prefix."""
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    yield server
    server.kill()
