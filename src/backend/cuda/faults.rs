//! What refusals of the driver mean: which version is missing, who holds a device, whether a process can go on after an error.
//! Never touches a device. Surprising fact: after some errors every later call of the process fails, also those that free memory, so the
//! first of them is the one to tell.

use std::fmt;

use cudarc::driver::sys::{self, CUresult};

/// A version of CUDA.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Version {
    pub major: u32,
    pub minor: u32,
}

/// The oldest version whose drivers have all calls of this program: the time between two events changed its name then.
pub(super) const DRIVER_LEAST: Version = Version { major: 12, minor: 8 };

/// The oldest compute capability that has what the kernels are written in: asynchronous copies and 8-bit tensor products of this shape.
pub(super) const CAPABILITY_LEAST: (u32, u32) = (8, 0);

impl Version {
    /// From 1000 times the major and 10 times the minor number.
    fn of_number(number: i32) -> Self {
        let number = number.max(0) as u32;
        Self { major: number / 1000, minor: number % 1000 / 10 }
    }

    /// What the installed driver offers; the library must be there.
    pub(super) fn of_driver() -> Option<Self> {
        let mut number = 0;
        // SAFETY: the pointer is valid for the call, which needs no initialised driver.
        let told = unsafe { sys::cuDriverGetVersion(&mut number) }.result();
        told.ok().map(|()| Self::of_number(number))
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// What to try when the driver does not start.
pub(super) fn start_hint(error: CUresult) -> &'static str {
    match error {
        CUresult::CUDA_ERROR_NO_DEVICE => "see what nvidia-smi -L lists and what CUDA_VISIBLE_DEVICES hides",
        CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH | CUresult::CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE => {
            "the driver's library and its kernel module are of different versions: restart the machine"
        }
        CUresult::CUDA_ERROR_SYSTEM_NOT_READY => "see whether the service nvidia-fabricmanager runs",
        _ => "see whether nvidia-smi works",
    }
}

/// What to try when a device cannot be used.
pub(super) fn use_hint(error: CUresult) -> &'static str {
    match error {
        CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE | CUresult::CUDA_ERROR_CONTEXT_ALREADY_IN_USE => {
            "another process has it for itself: wait until that ends, or name another device with --gpu-devices"
        }
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
            "other processes fill its memory, nvidia-smi lists them: end one, or name another device with --gpu-devices"
        }
        _ => "see whether nvidia-smi works",
    }
}

/// Whether a refusal of kernels is about the device, and not about what they are compiled for.
pub(super) fn is_of_the_device(error: CUresult) -> bool {
    error == CUresult::CUDA_ERROR_OUT_OF_MEMORY || is_lasting(error)
}

/// Whether every later call of this process will fail too.
pub(super) fn is_lasting(error: CUresult) -> bool {
    matches!(
        error,
        CUresult::CUDA_ERROR_NO_DEVICE
            | CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE
            | CUresult::CUDA_ERROR_DEINITIALIZED
            | CUresult::CUDA_ERROR_ECC_UNCORRECTABLE
            | CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
            | CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
            | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | CUresult::CUDA_ERROR_ASSERT
            | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
            | CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUresult::CUDA_ERROR_INVALID_PC
            | CUresult::CUDA_ERROR_LAUNCH_FAILED
            | CUresult::CUDA_ERROR_UNKNOWN
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_told_and_compared() {
        let version = |number| Version::of_number(number);
        assert_eq!(version(12_080), DRIVER_LEAST);
        assert!(version(12_060) < DRIVER_LEAST && version(11_040) < DRIVER_LEAST && version(13_000) > DRIVER_LEAST);
        assert_eq!(version(13_010).to_string(), "13.1");
        assert_eq!(version(-1).to_string(), "0.0");
    }

    #[test]
    fn a_full_memory_is_no_lost_device() {
        assert!(is_lasting(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS) && is_lasting(CUresult::CUDA_ERROR_LAUNCH_FAILED));
        assert!(!is_lasting(CUresult::CUDA_ERROR_OUT_OF_MEMORY) && !is_lasting(CUresult::CUDA_ERROR_NOT_READY));
        assert!(!is_lasting(CUresult::CUDA_ERROR_INVALID_VALUE));
        assert!(is_of_the_device(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
        assert!(!is_of_the_device(CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION));
    }
}
