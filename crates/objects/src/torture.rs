//! Crash tests: power cuts, second power cuts and bad disks.
//!
//! ```text
//!   script ── Store ── recorder ── memory      marks: how many groups were waited for
//!     │                   │ log
//!   history            states that a power cut can leave ──▶ judge: open, read all
//!   what a reader sees    │                                    │ which prefix is it?
//!   after each group      └── recovery's own writes, cut ◀── second life: change, wait,
//!                                                             open again
//! ```
//!
//! Law 1: the contents of a state are those after some whole prefix of the groups, which includes
//! every awaited group.
//! Law 2: a seed determines a run; seed and number identify a state.
//! Law 3: the judge knows nothing of the implementation: it opens, reads and writes.
#![allow(
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unreachable,
    clippy::unwrap_used,
    reason = "a judge for tests and the lab, never part of a store: it may stop with a panic"
)]

mod creation;
mod damage;
mod disk_loss;
mod history;
mod hostile;
mod judge;
mod partial_contents;
mod run;
mod script;
mod stores;
mod usage;

pub use draconis_device::Random;

pub use crate::test_hooks::{InjectedFault, Settings, set};
pub use creation::make_over;
pub use damage::{Damage, DamageTally, damage, fail};
pub use disk_loss::{DiskFactory, ended};
pub use history::{Contents, History};
pub use hostile::{altered, base, exercise, spoil};
pub use judge::{Effort, Judge, Violation};
pub use run::{Recorded, Tally, cut, record};
pub use script::{Script, ScriptOp, ScriptStep, Shape, random, random_large, sequence, sequences};
#[cfg(test)]
pub(crate) use stores::bytes_of;
pub use usage::{Usage, ordinary};
