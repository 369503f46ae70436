//! Whole unmounted volumes of ext2, ext3 and ext4: made, checked, repaired, resized, read when damaged.
//!
//! | module | does |
//! |---|---|
//! | [`mkfs`] | makes volumes, filled from a tree |
//! | [`check`] | finds damage, as `e2fsck -fn` |
//! | [`repair`] | plans fixes in memory, checks them, writes them as one change |
//! | [`grow`], [`shrink`], [`tune`] | size, features, inode size |
//! | [`rescue`], [`undelete`] | files of damaged volumes, deleted files; reading only |
//! | `offline`, `rewrite`, `redo_log` | a volume planned in memory, and its change at once |
//!
//! Law 1: a change of a volume is whole or absent after a power cut: `redo_log`.
//! Law 2: no bytes on a disk make this crate panic, loop without end, or allocate memory in
//! proportion to the sizes that they claim.
//! Law 3: of the live volume it uses only what [`draconis_ext_volume::unmounted`] offers.
//!
//! Programs use `draconis-ext`, which offers all of this.

#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(
        clippy::arithmetic_side_effects,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss,
        clippy::expect_used,
        clippy::indexing_slicing,
        clippy::panic,
        clippy::unreachable,
        clippy::unwrap_used
    )
)]

pub mod check;
mod dir;
pub mod grow;
mod label;
mod map;
pub mod mkfs;
mod offline;
mod redo_log;
pub mod repair;
pub mod rescue;
mod rewrite;
pub mod shrink;
pub mod tune;
pub mod undelete;

use draconis_ext_format as format;
use draconis_ext_format::units;
use draconis_ext_format::{Error, FileBlock, FileId, FsBlock, GroupNumber, InodeNumber, Result};
use draconis_ext_volume::unmounted::{backup, blocks, journal, mmp, options, reader, volume};
use draconis_ext_volume::{BlockLocation, Run, SharedBytes};

pub use label::set_label;
pub use offline::recover_unmounted;
pub use redo_log::finish_interrupted_change;
