"""The rendezvous: everything this project keeps in etcd, and the only code that talks to it.

`Etcd` is the client, `Lease` and `Watch` keep something alive over it, `Leadership` fences writes, `Keys` says where
things lie, and `EtcdServer` runs a local etcd.
"""

from elastic.rendezvous.client import Etcd
from elastic.rendezvous.keys import Keys, Parsed
from elastic.rendezvous.leader import Fenced, Leadership
from elastic.rendezvous.lease import Lease
from elastic.rendezvous.once import txn_once
from elastic.rendezvous.server import EtcdServer, find_etcd
from elastic.rendezvous.shim import load_etcd3
from elastic.rendezvous.values import (
    KV,
    Compare,
    Delete,
    LeaseGone,
    Op,
    Put,
    Status,
    TxnResult,
    TxnUnknown,
    absent,
    created,
    modified,
    value_is,
)
from elastic.rendezvous.watch import Event, Watch, watch_prefix

__all__ = [
    "KV",
    "Compare",
    "Delete",
    "Etcd",
    "EtcdServer",
    "Event",
    "Fenced",
    "Keys",
    "Leadership",
    "Lease",
    "LeaseGone",
    "Op",
    "Parsed",
    "Put",
    "Status",
    "TxnResult",
    "TxnUnknown",
    "Watch",
    "absent",
    "created",
    "find_etcd",
    "load_etcd3",
    "modified",
    "txn_once",
    "value_is",
    "watch_prefix",
]
