// The Python module: each handler as a capsule for `jax.ffi.register_ffi_target`.
#include <Python.h>

#include "xla/ffi/api/c_api.h"

#define HANDLERS(each) \
  each(causal_conv1d) each(elementwise) each(grouped_matmul) each(linear) each(read_slots) each(recurrence_replay) \
      each(recurrence_update) each(selective_update) each(write_slots)

#define DECLARE(name) extern "C" XLA_FFI_Error* name(XLA_FFI_CallFrame* frame);
HANDLERS(DECLARE)

namespace native {
const char* instructions();
bool multiplies_bfloat16();
}

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
#define ADD(name) add(module, #name, name) &&
  if (HANDLERS(ADD) true) {
    if (PyModule_AddStringConstant(module, "INSTRUCTIONS", native::instructions()) == 0 &&
        PyModule_AddIntConstant(module, "MULTIPLIES_BFLOAT16", native::multiplies_bfloat16()) == 0) {
      return module;
    }
  }
  Py_DECREF(module);
  return nullptr;
}
