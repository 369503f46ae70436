//! Errors of rings.

/// What makes a ring unusable.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// A ring or a chain is outside the memory of the guest, or misaligned.
    #[error("memory that the guest does not have")]
    Memory,
    /// A chain cannot be followed or answered.
    #[error("broken descriptor chain: {0}")]
    Chain(&'static str),
    /// More chains are available than the ring has entries.
    #[error("the available ring has a wrong index")]
    AvailableIndex,
    /// The guest makes a chain available that it has not got back.
    #[error("descriptor {0} is available twice")]
    InUse(u16),
    /// The descriptor for kicks failed.
    #[error("kick: {0}")]
    Kick(String),
}

impl From<vm_memory::GuestMemoryError> for RingError {
    fn from(_: vm_memory::GuestMemoryError) -> Self {
        Self::Memory
    }
}
