"""Puts kills around the seams of a worker, from outside: the product's own code knows nothing of them.

A worker that comes to a phase for which a token file lies in ``$KILL_TOKENS`` takes it and dies by SIGKILL, alone or
with its whole node.
"""

import functools
import importlib.abc
import importlib.machinery
import os
import random
import signal
import sys
import time

TOKENS = os.environ.get("KILL_TOKENS", "")


def maybe_die(phase, delay_s=0.0):
    for name, whole_node in ((phase, False), (phase + ".node", True)):
        token = os.path.join(TOKENS, name)
        try:
            os.rename(token, f"{token}.{os.getpid()}.used")
        except OSError:
            continue
        if delay_s:
            time.sleep(random.random() * delay_s)
        if whole_node:
            os.killpg(os.getpgid(0), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def around(owner, name, before=None, after=None, during=None):
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args, **kwargs):
        if before:
            maybe_die(before)
        if during:
            # While the call runs in this thread, another thread waits for the token a moment and strikes.
            import threading

            threading.Thread(target=maybe_die, args=(during, 0.004), daemon=True).start()
        result = original(*args, **kwargs)
        if after:
            maybe_die(after)
        return result

    setattr(owner, name, wrapped)


def patch():
    import torch.distributed as dist

    from elastic.engine import session, stage, step
    from elastic.engine.session import Session

    around(stage.StageModule, "forward", after="forward")
    around(stage.Stage, "backward_one_chunk", after="backward")
    around(step.Gradients, "reduce", before="before-reduction", during="in-reduction")
    around(step.Epoch, "_vote", before="before-vote", during="in-vote", after="after-vote")
    around(step.Epoch, "_apply", before="before-optimizer", during="in-optimizer", after="after-optimizer")
    around(Session, "freeze", before="before-freezing", after="after-freezing")
    around(Session, "_settle", before="before-settling", after="after-settling")
    around(session, "form", before="before-forming", during="in-forming", after="after-forming")
    around(session, "fetch_layer", before="before-transfer", during="in-transfer", after="after-transfer")
    around(Session, "_find", after="giving-a-layer")
    assert dist.is_available()


def patch_controller():
    """``controller-before-KIND`` and ``controller-after-KIND``: around the transaction with an effect of that kind."""
    from elastic.control.controller import Controller
    from elastic.rendezvous import Leadership

    kinds = []
    ops, fenced = Controller._ops, Leadership.fenced

    def noting(self, effect, fence):
        kinds.append(type(effect).__name__)
        return ops(self, effect, fence)

    def dying(self, *args, **kwargs):
        seen = list(kinds)
        kinds.clear()
        for kind in seen:
            maybe_die(f"controller-before-{kind}")
        result = fenced(self, *args, **kwargs)
        for kind in seen:
            maybe_die(f"controller-after-{kind}")
        return result

    Controller._ops, Leadership.fenced = noting, dying


PATCHES = {"elastic.engine.session": patch, "elastic.control.controller": patch_controller}


class AfterImport(importlib.abc.MetaPathFinder):
    """Patches once the engine, or the controller, has been imported."""

    def find_spec(self, name, path, target=None):
        if name not in PATCHES:
            return None
        patch = PATCHES.pop(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        original = spec.loader.exec_module

        def exec_module(module):
            original(module)
            patch()

        spec.loader.exec_module = exec_module
        return spec


if TOKENS:
    sys.meta_path.insert(0, AfterImport())
