"""Host detection on pretended machines, thread counts, executable memory refused."""

from __future__ import annotations

import os

import pytest

from looptune import host
from looptune.errors import (
    ArgumentError,
    ExecutableMemoryError,
    UnsupportedError,
    UnsupportedHostError,
)
from looptune.runtime import memory

AVX2 = "flags\t\t: fpu sse2 avx avx2 fma\n"
AVX512 = AVX2.replace("fma", "fma avx512f avx512dq avx512bw avx512vl")


@pytest.mark.skipif(not host.host_isas(AVX2), reason="only Linux on x86-64 runs kernels")
@pytest.mark.parametrize(
    ("cpuinfo", "isas"),
    [
        (AVX2, ("avx2",)),
        (AVX512, ("avx2", "avx512")),
        (AVX2.replace("fma", ""), ()),
        (AVX512.replace("avx512vl", ""), ("avx2",)),
        ("", ()),
    ],
)
def test_instruction_sets_by_flags(cpuinfo, isas):
    assert host.host_isas(cpuinfo) == isas


def test_the_widest_target_is_the_default(monkeypatch):
    monkeypatch.delenv("LOOPTUNE_ISA", raising=False)
    monkeypatch.setattr(host, "host_isas", lambda cpuinfo=None: ("avx2", "avx512"))
    assert host.host_target().name == "avx512"
    monkeypatch.setenv("LOOPTUNE_ISA", "xmm")
    assert host.host_target().name == "xmm"
    assert host.host_target("avx2").name == "avx2"
    monkeypatch.setenv("LOOPTUNE_ISA", "mmx")
    with pytest.raises(UnsupportedError, match=r"target 'mmx' is none of \['avx2'"):
        host.host_target()


def test_targets_the_machine_lacks_are_refused(monkeypatch):
    monkeypatch.setattr(host, "host_isas", lambda cpuinfo=None: ("avx2",))
    with pytest.raises(UnsupportedHostError, match=r"runs \['avx2'\], not avx512"):
        host.host_target("avx512")
    monkeypatch.setattr(host, "host_isas", lambda cpuinfo=None: ())
    with pytest.raises(UnsupportedHostError, match="no supported instruction set"):
        host.host_target()


def test_thread_counts_in_their_order(monkeypatch):
    monkeypatch.setattr(host, "available_cores", lambda: 8)
    for name in ("LOOPTUNE_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    assert host.thread_count() == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")
    assert host.thread_count() == 4
    monkeypatch.setenv("LOOPTUNE_NUM_THREADS", "3")
    assert host.thread_count() == 3
    assert host.thread_count(2) == 2
    assert host.thread_count(100) == 8


@pytest.mark.parametrize("bad", [0, -1, True, 1.5])
def test_bad_thread_counts_are_refused(bad):
    with pytest.raises(ArgumentError, match=r"threads is .* at least 1"):
        host.thread_count(bad)


def test_a_bad_variable_is_named(monkeypatch):
    monkeypatch.setenv("LOOPTUNE_NUM_THREADS", "many")
    with pytest.raises(ArgumentError, match="LOOPTUNE_NUM_THREADS is 'many'"):
        host.thread_count()


def test_quotas_cap_the_cores(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    for text, cores in (("150000 100000", 2), ("max 100000", 16), ("", 16)):
        (tmp_path / "cpu.max").write_text(text)
        monkeypatch.setattr(host, "QUOTA", tmp_path / "cpu.max")
        assert host.available_cores() == cores


def test_sizes_and_fingerprint():
    assert [host.parse_size(text) for text in ("48K", "2M", "1G", "12")] == [
        48 << 10,
        2 << 20,
        1 << 30,
        12,
    ]
    machine = host.fingerprint()
    assert machine.digest == host.fingerprint().digest
    assert len(machine.digest) == 12


def test_refused_executable_memory_names_the_policy(monkeypatch):
    def refuse(*_: object) -> int:
        raise PermissionError("not here")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(ExecutableMemoryError, match=r"not here.*policy such as SELinux"):
        memory.Arena(4096)


def test_large_code_gets_an_arena_of_its_own():
    code = bytes([0xC3]) * (memory.ARENA_BYTES + 5)
    held = memory.install(code)
    assert held.arena.size >= len(code)
    assert memory.install(b"\xc3").address % memory.ALIGNMENT == 0
