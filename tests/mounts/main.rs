//! Tests of mounts: calls, options, workers that die, keepers, comparisons with the kernel.

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/route.rs"]
mod route;

mod automount;
mod bucket_mounts;
mod copy_count;
mod demo_checks;
mod exact;
mod mount;
mod mount_keeper;
mod mount_life;
mod mount_options;
mod mount_restart;
mod mount_ring;
mod mount_write;
mod named_source;
mod namespaces;
mod odd_paths;
mod page_pool;
mod real_trees;
mod store_mounts;
mod storms;
mod systemd;
