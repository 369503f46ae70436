//! `ioctl` calls of the kernel's ext4 without a wrapper elsewhere.
//!
//! Each number encodes the bytes that the kernel reads and writes; the arrays are no shorter.

use std::fs::File;

use rustix::io::Result;
use rustix::ioctl::{Setter, Updater, ioctl};

/// Kind of shutdown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ShutdownMode {
    /// Uncommitted changes are lost.
    WithoutCommit = 2,
    /// Changes are committed first, but not checkpointed.
    AfterCommit = 1,
}

/// Shuts down the volume of `file` like a crash: nothing more is written to it.
pub fn shut_down(file: &File, how: ShutdownMode) -> Result<()> {
    const SHUTDOWN: u32 = 0x8004_587D;
    // SAFETY: the kernel reads four bytes.
    unsafe { ioctl(file, Setter::<SHUTDOWN, u32>::new(how as u32)) }
}

/// Returns the generation of an inode.
pub fn get_generation(file: &File) -> Result<u32> {
    const GETVERSION: u32 = 0x8008_7601;
    let mut answer = [0u32; 2];
    // SAFETY: the kernel writes at most eight bytes.
    unsafe { ioctl(file, Updater::<GETVERSION, _>::new(&mut answer))? };
    Ok(answer[0])
}

/// Version of an encryption policy, which determines how it names its key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EncryptionPolicy {
    /// Version 1: by a descriptor of eight bytes.
    First,
    /// Version 2: by an identifier that the kernel computes from the key.
    Second,
}

/// Encrypts new files in the empty directory `dir`, with a key that the mount forgets at its end.
pub fn set_encryption_policy(dir: &File, policy: EncryptionPolicy, padding: u8) -> Result<()> {
    const ADD_KEY: u32 = 0xC050_6617;
    const SET_POLICY: u32 = 0x800C_6613;
    const KEY_BYTES: u8 = 64;
    let mut key = [0u8; 80 + KEY_BYTES as usize];
    key[0] = policy as u8 + 1;
    key[8..16].copy_from_slice(b"an old k");
    key[40] = KEY_BYTES;
    key[80..].copy_from_slice(&std::array::from_fn::<u8, { KEY_BYTES as usize }, _>(|nth| {
        (nth as u8).wrapping_mul(37)
    }));
    // SAFETY: the kernel reads 80 bytes and the key behind them, and writes into the first 80.
    unsafe { ioctl(dir, Updater::<ADD_KEY, _>::new(&mut key))? };
    let mut rules = [0u8; 24];
    // AES-256-XTS for contents, AES-256-CTS for names.
    rules[..4].copy_from_slice(&[0, 1, 4, padding]);
    match policy {
        EncryptionPolicy::First => rules[4..12].copy_from_slice(&key[8..16]),
        EncryptionPolicy::Second => {
            rules[0] = 2;
            rules[8..].copy_from_slice(&key[8..24]);
        }
    }
    // SAFETY: the kernel reads 12 bytes of version 1, 24 of version 2.
    unsafe { ioctl(dir, Setter::<SET_POLICY, _>::new(rules)) }
}
