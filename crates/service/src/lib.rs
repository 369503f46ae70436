//! The manager, and for each mount a keeper and the sandboxed worker that the keeper starts.
//!
//! ```text
//!   client ── protocol ──▶ manager ── protocol ──▶ keeper
//!                  keeper ── process (volume contract) ──▶ worker ── volume ──▶ ext
//!                    ├── front (FUSE)                        └── sandbox
//!                    └── store_process (disk contract) ────▶ objects
//! ```
//!
//! This crate knows ext and the contracts, but neither FUSE nor the network. The program passes a
//! [`mounter::Mounter`], a [`worker::RequestServer`] and a [`remote_disk::RemoteDiskProvider`].
#![deny(unsafe_code)]

mod accepted_mark;
mod claimed_volume;
pub mod client;
mod connection;
mod disk;
pub mod export_status;
mod identity;
pub mod keeper;
mod loop_device;
pub mod manager;
mod mount_copies;
pub mod mount_namespace;
pub mod mount_table;
mod mount_users;
pub mod mounter;
mod oplog;
pub mod options;
pub mod parts;
pub mod path_members;
pub mod protocol;
pub mod remote_disk;
mod request_log;
pub mod sandbox;
pub mod sandbox_test;
pub mod store_keeper;
pub mod store_process;
pub mod user_namespace;
mod verbosity;
pub mod volume;
pub mod worker;
pub mod worker_process;

/// Returns the text of an error without the ` (os error N)` that Rust appends to system errors.
pub fn error_text(text: &(impl std::fmt::Display + ?Sized)) -> String {
    let text = text.to_string();
    let (mut rest, mut sentence) = (text.as_str(), String::new());
    while let Some((before, after)) = rest.split_once(" (os error ") {
        sentence += before;
        let digits = after.trim_start_matches(|c: char| c.is_ascii_digit());
        rest = digits.strip_prefix(')').unwrap_or_else(|| {
            sentence += " (os error ";
            after
        });
    }
    sentence + rest
}

#[cfg(test)]
mod tests {
    use super::error_text;

    #[test]
    fn error_text_omits_os_error_numbers() {
        assert_eq!(error_text("x (os error 28): y (os error z) (os error 5)"), "x: y (os error z)");
        let missing = std::io::Error::from_raw_os_error(2);
        assert_eq!(error_text(&missing), "No such file or directory");
    }
}
