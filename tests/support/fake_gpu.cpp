// A CUDA device that is not there: what a CPU build of torch lacks before it takes "cuda" for a device.
//
// The guard answers "device 0" to every question about the current device and stream; the hooks say that there is one
// device. Nothing here can compute, so tensors on the device must be fake (torch._subclasses.FakeTensorMode).

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>

namespace at {

struct AbsentCUDAHooks : public CUDAHooksInterface {
  AbsentCUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
};

// The registry looks its classes up by name: this is the one that torch asks for.
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, AbsentCUDAHooks)

} // namespace at

namespace c10::impl {

C10_REGISTER_GUARD_IMPL(CUDA, FakeGuardImpl<DeviceType::CUDA>)

} // namespace c10::impl
