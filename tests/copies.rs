//! Number of copies of file data between the FUSE messages and the device. Runs the whole path of
//! a mount in one process, including the disk service behind its session.
//!
//! The copies by the kernel (requests into the worker, replies out of it) and by the device do not
//! count.

#[path = "common/route.rs"]
mod route;

use draconis_exchange::copy_counter;
use route::kernel::Kernel;
use route::with_mount;

/// Bytes to transfer, and the size of a piece.
const BYTES: usize = 2 << 20;
const PIECE: usize = 128 << 10;

/// Returns the copies per byte of `bytes` in tenths; metadata adds a little.
fn tenths_of(bytes: usize, what: impl FnOnce()) -> u64 {
    let before = copy_counter::bytes().expect("a build that counts");
    what();
    (copy_counter::bytes().unwrap() - before) * 10 / bytes as u64
}

/// A single test, because the counter is global to the process.
#[test]
fn contents_are_copied_as_rarely_as_the_map_says() {
    with_mount(16 << 20, |kernel, _| {
        let file = kernel.create(1, "file").unwrap();
        let piece: Vec<u8> = (0..PIECE).map(|at| (at * 7 + at / 251) as u8).collect();
        let write = |kernel: &mut Kernel| {
            for at in (0..BYTES).step_by(PIECE) {
                assert_eq!(kernel.write(file, at as u64, &piece, 0), Ok(PIECE as u32));
            }
            kernel.fsync(file).unwrap();
        };
        write(kernel);
        let again = tenths_of(BYTES, || write(kernel));
        assert_eq!(again / 10, WRITE_COPIES, "a write with fsync: {again} tenths");
        let read = |kernel: &mut Kernel| {
            for at in (0..BYTES).step_by(PIECE) {
                assert!(kernel.read(file, at as u64, PIECE as u32).unwrap() == piece, "{at}");
            }
        };
        read(kernel);
        let warm = tenths_of(BYTES, || read(kernel));
        assert_eq!(warm, 0, "a warm read, beside the kernel's: {warm} tenths");
    });
}

/// The copy out of the memory that the kernel filled and the disk service knows.
const WRITE_COPIES: u64 = 1;
