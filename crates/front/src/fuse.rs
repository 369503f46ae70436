//! FUSE: serves the kernel's requests from an implementation of the directory contract.
//!
//! ```text
//!   mount ──▶ /dev/fuse descriptor ──▶ (another process) ──▶ Server::serve
//! ```
//!
//! Law 1: mounting and serving are separate steps. So the serving process needs neither a path nor
//! a privilege, and the descriptor can outlive it.
//! Law 2: the volume changes only through this server, so the kernel may cache names, attributes
//! and pages without a timeout. Where a change affects more than the kernel knows, it is notified.

mod activity;

mod decoder;
mod handler;
mod init;
mod mount;
mod named_source;
mod notify;
mod open;
mod options;

mod reply;
mod request;
mod ring;
mod serve;
mod sync_batch;
mod transport;

pub use activity::Activity;
pub use mount::{KernelOptions, MountError, mount, read_ahead_file, remount, unmount};
pub use options::ServerOptions;
pub use ring::RingSet;
pub use serve::Server;
