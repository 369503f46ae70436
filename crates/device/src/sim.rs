//! Simulated disks: what they hold and how long they take, each by itself.
//!
//! ```text
//!   SimDisk ── state:  sparse image · what a power cut would undo
//!      │    └─ order:  groups, tickets, flushes, as every disk keeps them
//!      ▼
//!   Timing: take(request) · next_ns · advance      Hdd │ Ssd
//!      │
//!   Clock: virtual nanoseconds, moved by waiters
//! ```
//!
//! A request is made at the virtual time at which its caller asks. Time stands still until
//! there is a waiter - for a read, a group, a flush - and then goes on to the moment at which
//! that is done; what else was asked for by then is done meanwhile. [`Clock::advance`] is
//! time that passes without a waiter: a client that thinks.
//!
//! Law 1: reads see what was submitted at once, and take the time that the device takes.
//! Law 2: what is not durable may be lost: [`SimDisk::crash`].
//! Law 3: one thread, one seed, one run: what is done when is the same every time
//! ([`Statistics::trace`]).
//!
//! This module does not read a clock of this world, and knows no faults: those stack.

mod acceptance;
mod clock;
mod disk;
mod hdd;
mod image;
mod ssd;
mod timing;
mod undo;

pub use acceptance::{Row, acceptance};
pub use clock::Clock;
pub use disk::{SimDisk, Statistics};
pub use hdd::{Hdd, HddParameters};
pub use ssd::{Ssd, SsdParameters};
pub use timing::{Completion, Model, Request, RequestKind, Timing, WorkCounters};
