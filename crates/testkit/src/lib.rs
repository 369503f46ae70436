//! What tests and the lab need to judge disks and stores, and no product contains.
//!
//! ```text
//!   RecordDisk ──▶ CrashStates      requests of a run, and the states that a power cut can leave
//!   FaultDisk                       errors, torn and lost writes, rot, from a seed
//!   sim                             models of a hard disk and of flash in virtual time
//!   conform                         what every disk must do
//!   torture                         campaigns over object stores: power cuts, damage, long use
//! ```
//!
//! Law: a seed determines a run; a failure names its seed.

#![deny(unsafe_code)]

pub mod conform;
mod crash;
mod fault;
mod record;
pub mod sim;
pub mod torture;

pub use crash::{CrashDisk, CrashKind, CrashOptions, CrashState, CrashStates};
pub use fault::{Fault, FaultDisk, FaultTarget};
pub use record::{Event, RecordDisk};
