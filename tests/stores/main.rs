//! Tests of object stores: commands, snapshots, followers, buckets.

#[path = "../common/mod.rs"]
mod common;

mod bucket;
mod followers;
mod object_volume;
mod store;
mod store_process;
mod store_snapshots;
