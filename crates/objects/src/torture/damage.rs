//! Disks that lose, misplace and change what they were given.

/// What a disk does wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Damage;

/// To be written.
pub fn damage() {}
