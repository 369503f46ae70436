//! Tests of the commands that read, make, check and change volumes.

#[path = "../common/mod.rs"]
mod common;

mod archive_trees;
mod archives;
mod book;
mod check;
mod completion;
mod container_changes;
mod containers;
mod copy_out;
mod edit_commands;
mod format;
mod manual;
mod messages;
mod oci;
mod odd_paths;
mod package;
mod raid_members;
mod read_commands;
mod repair;
mod rescue;
mod source_lengths;
mod source_protection;
mod tune;
mod undelete;
