//! Number of copies of file data between the FUSE messages and the device. Runs the whole path of
//! a mount in one process, including the disk service behind its session.
//!
//! The copies by the kernel (requests into the worker, replies out of it) and by the device do not
//! count.

use crate::route::kernel::ScriptedKernel;
use crate::route::with_simulated_mount;
use draconis_types::copy_counter;

/// Bytes to transfer, and the size of a piece.
const TRANSFER_BYTES: usize = 2 << 20;
const REQUEST_BYTES: usize = 128 << 10;

/// Returns the copies per byte of `bytes` in tenths; metadata adds a little.
fn copies_per_byte_in_tenths(bytes: usize, what: impl FnOnce()) -> u64 {
    let before = copy_counter::copied_bytes().expect("a build that counts");
    what();
    (copy_counter::copied_bytes().unwrap() - before) * 10 / bytes as u64
}

/// A single test, because the counter is global to the process.
#[test]
fn copies_per_byte_match_documentation() {
    draconis_testkit::in_own_process!();
    with_simulated_mount(16 << 20, |kernel, _| {
        let file = kernel.create(1, "file").unwrap();
        let piece: Vec<u8> = (0..REQUEST_BYTES).map(|at| (at * 7 + at / 251) as u8).collect();
        let write = |kernel: &mut ScriptedKernel| {
            for at in (0..TRANSFER_BYTES).step_by(REQUEST_BYTES) {
                assert_eq!(kernel.write(file, at as u64, &piece, 0), Ok(REQUEST_BYTES as u32));
            }
            kernel.fsync(file).unwrap();
        };
        write(kernel);
        let again = copies_per_byte_in_tenths(TRANSFER_BYTES, || write(kernel));
        assert_eq!(again / 10, EXPECTED_WRITE_COPIES, "a write with fsync: {again} tenths");
        let read = |kernel: &mut ScriptedKernel| {
            for at in (0..TRANSFER_BYTES).step_by(REQUEST_BYTES) {
                assert!(
                    kernel.read(file, at as u64, REQUEST_BYTES as u32).unwrap() == piece,
                    "{at}"
                );
            }
        };
        read(kernel);
        let warm = copies_per_byte_in_tenths(TRANSFER_BYTES, || read(kernel));
        assert_eq!(warm, 0, "a warm read, beside the kernel's: {warm} tenths");
    });
}

/// The copy out of the memory that the kernel filled and the disk service knows.
const EXPECTED_WRITE_COPIES: u64 = 1;
