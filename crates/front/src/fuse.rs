//! FUSE: the kernel's requests answered by a server of the directory contract.
//!
//! ```text
//!   mount ──▶ /dev/fuse descriptor ──▶ (another process) ──▶ Server::serve
//! ```
//!
//! Law 1: mounting and serving are two steps, so the process that serves needs no path and
//! no privilege, and the descriptor can outlive it.
//! Law 2: the volume changes only through us, so the kernel may keep names, attributes
//! and pages for as long as it likes; where a change does more than the kernel can know of,
//! it is told.

mod activity;
mod change;
mod decoder;
mod handler;
mod init;
mod mount;
mod notify;
mod open;
mod replay;
mod reply;
mod request;
mod serve;
mod sync_batch;

pub use activity::Activity;
pub use mount::{KernelOptions, MountError, mount, read_ahead_file, remount, unmount};
pub use serve::{Server, ServerOptions};
