"""The contract on the adapter that the docs show to authors of adapters, found as a stranger's would be."""

from pathlib import Path

import pytest

from eventbus.registry import adapter_class
from eventbus.testing.contract import BrokerUnderTest, ContractSuite


class TestFolderBus(ContractSuite):
    @pytest.fixture
    def broker(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BrokerUnderTest:
        """An installed package is, to the registry, a dist-info folder with an entry point."""
        info = tmp_path / "site" / "folder_bus-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: folder-bus\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[eventbus.adapters]\nfolder = examples.folder_bus:FolderAdapter\n")
        monkeypatch.syspath_prepend(str(info.parent))
        assert adapter_class("folder:///x").name == "folder"
        home = tmp_path / "bus"
        home.mkdir()
        return BrokerUnderTest(url=f"folder://{home}")
