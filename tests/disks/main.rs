//! Tests of exported disks: NBD, vhost-user, disks in stores, guests that boot from them.

#[path = "../common/mod.rs"]
mod common;

mod boot;
mod export;
mod export_clones;
mod export_faults;
mod export_kills;
mod export_tls;
mod export_vhost_user;
mod store_device;
mod store_disks;
