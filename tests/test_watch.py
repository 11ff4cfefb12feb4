"""Watched dicts: no change goes unnoticed, and the process is none the worse for it."""

import collections
import gc
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphrt.capture.watch import DictWatch

needs_watchers = pytest.mark.skipif(sys.version_info < (3, 12), reason="CPython has dict watchers from 3.12 on")


def started(*dicts: Any) -> DictWatch:
    watch = DictWatch(dicts)
    watch.start()
    return watch


def test_dicts_that_nobody_has_looked_at_may_have_changed() -> None:
    assert DictWatch([{}]).may_have_changed


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="this Python has dict watchers")
def test_where_changes_cannot_be_known_there_may_always_be_one() -> None:
    assert started({}).may_have_changed


def test_what_is_no_dict_may_always_have_changed() -> None:
    assert started({}, collections.UserDict()).may_have_changed


CHANGES: dict[str, Callable[[dict[str, int]], Any]] = {
    "add": lambda d: d.update(c=3),
    "setdefault": lambda d: d.setdefault("c", 3),
    "replace": lambda d: d.__setitem__("a", 3),
    "delete": lambda d: d.__delitem__("a"),
    "pop": lambda d: d.pop("a"),
    "popitem": lambda d: d.popitem(),
    "clear": lambda d: d.clear(),
    "update": lambda d: d.update({"b": 5}),
    "or": lambda d: d.__ior__({"b": 5}),
    "init": lambda d: d.__init__(b=5),
}


@needs_watchers
@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, lambda **items: collections.defaultdict(int, **items)])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_every_change_of_every_dict_is_noticed_until_the_next_look(kind: Callable[..., Any], change: Callable[..., Any]) -> None:
    dicts = [kind(a=1, b=2), kind(a=1, b=2)]
    watch = started(*dicts)
    for each in dicts:
        assert not watch.may_have_changed
        change(each)
        assert watch.may_have_changed
        watch.start()
    assert not watch.may_have_changed


@needs_watchers
def test_a_dict_that_is_filled_by_another_ones_copy_is_noticed() -> None:
    empty: dict[str, int] = {}
    watch = started(empty)
    empty.update({"a": 1})
    assert watch.may_have_changed


@needs_watchers
def test_attributes_are_noticed_in_the_dict_of_their_owner_however_hot_the_code_is() -> None:
    class Owner:
        pass

    owner = Owner()
    owner.flag = False  # type: ignore[attr-defined]
    watch = started(vars(owner))
    for i in range(200):  # long enough for the interpreter to specialize the store
        watch.start()
        owner.flag = i  # type: ignore[attr-defined]
        assert watch.may_have_changed


@needs_watchers
def test_a_modules_mode_is_noticed_where_it_changes_and_not_where_it_stays() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    watch = started(*map(vars, model.modules()))
    model.train()
    assert not watch.may_have_changed
    model[1].eval()
    assert watch.may_have_changed


@needs_watchers
def test_looking_is_no_change() -> None:
    d = {"a": 1}
    watch = started(d)
    assert (d["a"], list(d.values()), d.get("b"), dict(d), d == {}, "a" in d) == (1, [1], None, {"a": 1}, False, True)
    d["a"] = d["a"]
    assert not watch.may_have_changed


@needs_watchers
def test_two_watches_of_one_dict_both_notice_and_the_end_of_one_does_not_blind_the_other() -> None:
    d = {"a": 1}
    one, other = started(d), started(d)
    d["a"] = 2
    assert (one.may_have_changed, other.may_have_changed) == (True, True)
    one.start()
    assert (one.may_have_changed, other.may_have_changed) == (False, True)
    other.start()
    del one
    assert other.may_have_changed
    other.start()
    assert not other.may_have_changed
    d["a"] = 3
    assert other.may_have_changed


@needs_watchers
def test_a_dropped_watch_frees_its_dicts_also_from_a_cycle() -> None:
    class Freed(dict[str, Any]):
        def __del__(self) -> None:
            freed.append(1)

    freed: list[int] = []
    d = Freed()
    d["watch"] = started(d)
    del d
    gc.collect()
    assert freed == [1]


@needs_watchers
def test_an_exception_under_way_is_the_same_after_its_frames_have_ended_their_watches() -> None:
    def fail() -> None:
        d = {"a": 1}
        watch = started(d)
        del d
        raise KeyError("the user's own", watch.may_have_changed)

    for _ in range(100):
        with pytest.raises(KeyError, match="the user's own"):
            fail()


@needs_watchers
@pytest.mark.gpu
def test_a_change_on_a_thread_that_the_interpreter_did_not_start_is_noticed() -> None:
    model = nn.Linear(16, 16).cuda()
    y = model(torch.ones(16, 16, device="cuda"))
    watch = started(vars(model))
    y.register_hook(lambda _: setattr(model, "thread", threading.get_ident()))
    y.sum().backward()
    assert watch.may_have_changed
    assert model.thread != threading.get_ident()


def run_python(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
def test_the_interpreter_ends_quietly_with_watches_alive_and_dicts_changing() -> None:
    run_python("""
        import atexit
        watches = []
        atexit.register(lambda: (d.clear(), watches[0].start(), exec("assert watches[0].may_have_changed")))
        from graphrt.capture.watch import DictWatch
        class Late:
            def __del__(self):
                vars(self).update(a=2)
        late, d = Late(), {"a": 1}
        watches.append(DictWatch([vars(late), d, globals()]))
        watches[0].start()
    """)


@needs_watchers
def test_without_a_free_place_in_the_interpreter_there_may_always_be_a_change() -> None:
    run_python("""
        import ctypes
        from graphrt.capture.watch import DictWatch
        nothing = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0)
        try:
            while True:
                ctypes.pythonapi.PyDict_AddWatcher(nothing)
        except RuntimeError:
            pass
        watch = DictWatch([{}])
        watch.start()
        assert watch.may_have_changed
    """)
