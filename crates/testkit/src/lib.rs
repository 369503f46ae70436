//! What tests and the lab need to judge disks and stores, and no product contains.
//!
//! ```text
//!   RecordDisk ──▶ CrashStates      requests of a run, and the states that a power cut can leave
//!   FaultDisk                       errors, torn and lost writes, rot, from a seed
//!   sim                             models of a hard disk and of flash in virtual time
//!   conform                         what every disk must do
//!   judge                           e2fsprogs, which judge volumes
//!   torture                         campaigns over object stores: power cuts, damage, long use
//!   thin                            zeros take no space, through every door
//!   wait, child, fork, skipped      waits without a clock, processes of tests, what was left out
//!   first_and_all!                  tests of the first items now, of all later
//! ```
//!
//! Law: a seed determines a run; a failure names its seed.

#![deny(unsafe_code)]

mod child;
pub mod conform;
mod crash;
mod fault;
mod first_and_all;
mod fork;
pub mod judge;
mod record;
pub mod sim;
mod skipped;
pub mod thin;
pub mod torture;
mod unmount;
mod versitygw;
pub mod wait;

pub use child::{child_test_command, is_in_own_process};
pub use crash::{CrashDisk, CrashKind, CrashOptions, CrashState, CrashStates};
pub use fault::{Fault, FaultDisk, FaultTarget};
pub use fork::ForkedChild;
pub use record::{Event, RecordDisk};
pub use skipped::report_skipped;
pub use unmount::unmount_and_wait;
pub use versitygw::find_versitygw;
