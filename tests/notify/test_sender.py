"""Sending to real servers: what is taken, what is refused, and a server that never answers."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.config.load import config_from_data
from orchestrator.config.schema import NotifyConfig
from orchestrator.errors import ConfigError, UsageError
from orchestrator.run.notify_urls import URLS_VARIABLE, notify_urls
from orchestrator.view.notify import MessageText, deliver
from tests.notify.receivers import Receiver, black_hole, http_receiver
from tests.scene import PATIENCE_S, python

pytestmark = pytest.mark.filterwarnings("ignore:'(imghdr|cgi)':DeprecationWarning")  # apprise
TEXT = MessageText(title="title", body="body", severity="info")
SMALL = {"nodes": {"pc1": {"gpu": "rtx-3090", "workers": 1, "vram_per_worker_gib": 1}}}


def test_a_message_reaches_its_server_without_a_secret() -> None:
    with http_receiver() as http:
        text = MessageText(title="pc2 is gone", body="first\nsecond", severity="critical")
        (sent,) = deliver([http.json_url()], text, PATIENCE_S)
    assert str(sent) == f"json://bot:****@127.0.0.1:{http.port}  accepted"
    assert http.messages == [("pc2 is gone", "first\nsecond")]
    assert "hush" not in repr(sent)
    assert "deep-path" not in repr(sent)


def test_a_refusing_server_is_named_and_the_others_get_it() -> None:
    with http_receiver(status=401) as refusing, http_receiver() as http:
        urls = [refusing.json_url("Verification"), "nonsense://hush-hush", http.json_url()]
        sent = deliver(urls, TEXT, PATIENCE_S)
    assert [one.reason is None for one in sent] == [False, False, True]
    assert "401" in str(sent[0])
    assert "Verification" not in str(sent[0]), "a word of the address"
    assert "no address that apprise knows" in str(sent[1])
    assert "hush" not in repr(sent)
    assert len(http.messages) == 1


def test_a_silent_server_is_given_up_and_delays_no_other() -> None:
    with black_hole() as hole, http_receiver() as http:
        # apprise's own limits must not be what ends it.
        urls, limit_s = [f"{hole.json_url()}&cto=999&rto=999", http.json_url()], 2.0
        sent = deliver(urls, TEXT, limit_s)
        while sent[1].reason is not None and limit_s < PATIENCE_S:  # a loaded machine takes longer
            limit_s *= 4
            sent = deliver(urls, TEXT, limit_s)
    assert [one.reason is None for one in sent] == [False, True], sent
    assert f"did not finish within {limit_s:g}" in str(sent[0])
    assert str(hole.port) in sent[0].name


@pytest.fixture
def urls_file(tmp_path: Path) -> Path:
    path = tmp_path / "urls"
    path.write_text("# mine\n\njson://a/\n  mailto://b/  \n", encoding="utf-8")
    path.chmod(0o600)
    return path


def test_addresses_come_from_a_private_file_or_environment(
    urls_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = NotifyConfig(urls_file=str(urls_file))
    assert notify_urls(settings) == ("json://a/", "mailto://b/")
    assert notify_urls(NotifyConfig()) == ()
    monkeypatch.setenv(URLS_VARIABLE, " json://c/ \n json://d/ ")
    assert notify_urls(settings) == ("json://c/", "json://d/")


def test_a_file_of_addresses_that_is_open_empty_or_gone_is_refused(urls_file: Path) -> None:
    settings = NotifyConfig(urls_file=str(urls_file))
    for mode in (0o640, 0o604, 0o620):
        urls_file.chmod(mode)
        with pytest.raises(UsageError, match=f"chmod 600 {urls_file}"):
            notify_urls(settings)
    urls_file.chmod(0o600)
    urls_file.write_text("# none yet\n", encoding="utf-8")
    with pytest.raises(UsageError, match="has 0 addresses"):
        notify_urls(settings)
    urls_file.unlink()
    with pytest.raises(UsageError, match="cannot be read"):
        notify_urls(settings)


def test_an_address_in_cluster_yaml_is_refused_unrepeated() -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_data({**SMALL, "notify": {"urls_file": "json://bot:hush-hush@here/"}})
    assert "chmod 600" in str(caught.value)
    assert "hush" not in str(caught.value)


def test_the_test_message_says_which_addresses_took_it(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("cluster.yaml").write_text(json.dumps(SMALL), encoding="utf-8")
    with http_receiver() as good, http_receiver(status=500) as bad:
        monkeypatch.setenv(URLS_VARIABLE, f"{good.json_url()} {bad.json_url()}")
        done = CliRunner().invoke(app, ["notify", "--test"])
        assert done.exit_code == 1, done.output
        first, second = done.output.splitlines()
        assert first == f"1  json://bot:****@127.0.0.1:{good.port}  accepted"
        assert second.startswith(f"2  json://bot:****@127.0.0.1:{bad.port}  failed: ")
        assert [len(each.messages) for each in (good, bad)] == [1, 1]
        monkeypatch.setenv(URLS_VARIABLE, good.json_url())
        assert CliRunner().invoke(app, ["notify", "--test"]).exit_code == 0


def test_without_apprise_the_verb_says_what_to_do(nowhere: Path) -> None:
    """Python without the packages of its environment stands for one without apprise."""
    Path("cluster.yaml").write_text(json.dumps(SMALL), encoding="utf-8")
    hidden = (
        "import sys; sys.modules['apprise'] = None; from orchestrator.cli.main import main; main()"
    )
    done = python("-c", hidden, "notify", "--test", **{URLS_VARIABLE: Receiver(port=1).json_url()})
    assert done.returncode == 2
    assert "pip install '.[notify]'" in done.stderr
    assert "hush" not in done.stderr
    assert os.environ.get(URLS_VARIABLE) is None
