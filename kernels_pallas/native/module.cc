// The Python module: each handler as a capsule for `jax.ffi.register_ffi_target`.
#include <Python.h>

#include "xla/ffi/api/c_api.h"

extern "C" XLA_FFI_Error* grouped_matmul(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* linear(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* state_replay(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* state_update(XLA_FFI_CallFrame* frame);

namespace {

bool add(PyObject* module, const char* name, XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*)) {
  PyObject* capsule = PyCapsule_New(reinterpret_cast<void*>(handler), nullptr, nullptr);
  if (capsule != nullptr && PyModule_AddObject(module, name, capsule) == 0) return true;
  Py_XDECREF(capsule);
  return false;
}

}  // namespace

PyMODINIT_FUNC PyInit__handlers(void) {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_handlers", nullptr, -1, nullptr};
  PyObject* module = PyModule_Create(&definition);
  if (module == nullptr) return nullptr;
  if (add(module, "grouped_matmul", grouped_matmul) && add(module, "linear", linear) &&
      add(module, "state_replay", state_replay) && add(module, "state_update", state_update)) {
    // Of weights; an earlier library has no such line, and knows float32 and bfloat16.
    if (PyModule_AddStringConstant(module, "DTYPES", "float32 bfloat16 int8") == 0) return module;
  }
  Py_DECREF(module);
  return nullptr;
}
