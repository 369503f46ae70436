//! Simulated disks: contents and timing, modelled separately.
//!
//! ```text
//!   SimDisk ── state:  sparse image · undo data for a power cut
//!      │    └─ order:  groups, tickets, flushes, as in every disk
//!      ▼
//!   Timing: take(request) · next_ns · advance      Hdd │ Ssd
//!      │
//!   Clock: virtual nanoseconds, advanced by waiters
//! ```
//!
//! A request starts at the virtual time of its call. Time advances only for a waiter - on a read, a
//! group, a flush - to the moment at which that is done; other requests proceed meanwhile.
//! [`Clock::advance`] passes time without a waiter, such as a client's computation.
//!
//! Law 1: reads see submitted writes at once, and take the device's time.
//! Law 2: writes that are not durable may be lost: [`SimDisk::crash_and_restart`].
//! Law 3: with one thread, a seed gives the same run every time ([`DiskStatistics::trace`]).
//!
//! This module reads no real clock and injects no faults: see [`crate::FaultDisk`].

mod acceptance;
mod clock;
mod disk;
mod hdd;
mod image;
mod ssd;
mod timing;
mod undo;

pub use acceptance::{ModelFigure, measure_models};
pub use clock::Clock;
pub use disk::{DiskStatistics, SimDisk};
pub use hdd::{Hdd, HddParameters};
pub use ssd::{Ssd, SsdParameters};
pub use timing::{Completion, DeviceModel, DeviceTiming, RequestKind, SimRequest, WorkCounters};
