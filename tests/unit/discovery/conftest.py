"""etcd for the tests of this folder."""

import pytest

from tests.unit.discovery.etcd_server import EtcdServer


@pytest.fixture
def etcd(tmp_path):
    """One for this test."""
    server = EtcdServer(tmp_path)
    yield server
    server.kill()


@pytest.fixture(scope="session")
def running_etcd(tmp_path_factory):
    """One for all tests that leave it running."""
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    yield server
    server.kill()


@pytest.fixture
def shared_etcd(running_etcd):
    """That one, without a record of a former test."""
    running_etcd.ctl("del", "--prefix", "/")
    return running_etcd
