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

use draconis_device::Random;

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

pub use creation::create_over_old_contents;
pub use damage::{DamageTally, DiskDamage, run_with_damage, run_with_failures};
pub use disk_loss::{DiskFactory, run_until_disk_loss};
use draconis_objects::test_hooks::{TestSettings, set_thread_settings};
pub use history::{Contents, History};
pub use hostile::{
    base_image, corrupt_image, exercise_image, image_from_fuzz_input, salvage_image,
};
pub use judge::{CheckFrequencies, Judge, Violation};
pub use run::{RecordedRun, RunTally, record_script, run_with_power_cuts};
pub use script::{
    Script, ScriptOp, ScriptStep, StoreShape, random, random_large, sequence, sequence_count,
};
pub use usage::{UsageTally, run_ordinary_use};
