//! How often contents are copied between the kernel's messages and the device: the whole
//! route of a mount in one process, the disk service behind its session among it.
//!
//! The kernel's own copies - of a request into the worker, of a reply out of it - and the
//! device's are not among them.

#[path = "common/route.rs"]
mod route;

use draconis_exchange::copy_counter;
use route::kernel::Kernel;
use route::with_mount;

/// What the route is asked to carry, and in pieces of how many bytes.
const BYTES: usize = 2 << 20;
const PIECE: usize = 128 << 10;

/// How often each byte of `bytes` was copied meanwhile, in tenths: metadata weighs a little.
fn tenths_of(bytes: usize, what: impl FnOnce()) -> u64 {
    let before = copy_counter::bytes().expect("a build that counts");
    what();
    (copy_counter::bytes().unwrap() - before) * 10 / bytes as u64
}

/// One test: what is counted is counted for the process.
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

/// Out of the memory that the kernel filled and the disk service knows.
const WRITE_COPIES: u64 = 1;
