"""The optional C extension: the one thing that setup.cfg cannot declare."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "looptune.runtime._native",
            ["looptune/runtime/_native.c"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            extra_compile_args=["-O2", "-std=c11", "-pthread"],
            extra_link_args=["-pthread"],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
