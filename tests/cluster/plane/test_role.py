"""The chart's role: every request of a whole life is one that it allows, in one namespace and in the whole cluster."""

from __future__ import annotations

import pytest
from playing.api import eventually
from playing.operating import Operator
from playing.proxy import Proxy


@pytest.mark.parametrize("scope", ["namespace", "cluster"])
def test_nothing_that_the_operator_asks_is_forbidden(account_of, pipeline, space, tmp_path, scope):
    values = (f"watchNamespaces={{{space}}}",) if scope == "namespace" else ()
    with Proxy(account_of(*values), tmp_path) as proxy:
        namespaces = space if scope == "namespace" else ""
        operator = Operator(proxy.config, tmp_path / "role.log", "role", namespaces=namespaces, home=space).start()
        try:
            pipeline.create(dit={"replicas": 2}).ready(within_s=40)
            pipeline.edit(dit={"image": "mammoth-dit:2", "maxNumSeqs": 2})
            eventually(lambda: len(pipeline.status["revisions"]) == 2)
            pipeline.ready(within_s=40)
            pipeline.edit(dit={"replicas": 1})
            eventually(lambda: pipeline.status["dit"]["summary"] == "1/1")
            pipeline.delete()
            eventually(lambda: pipeline.object is None)
        finally:
            operator.stop()
        asked = {(seen.method, seen.path) for seen in proxy.seen}
        assert len(asked) > 20
        assert not [seen for seen in proxy.seen if seen.status == 403]
