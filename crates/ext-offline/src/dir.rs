//! Blocks of directories: new ones, and what a damaged one still holds.

pub(crate) mod broken_chain;
pub(crate) mod build;
pub(crate) mod remains;

pub(crate) use draconis_ext_volume::unmounted::dir::{MAX_NAME_BYTES, edit, name_query};
