//! A mount whose buffer pool is exhausted: it copies instead, and loses no data.

use crate::route::with_simulated_mount;

const WRITE_BYTES: usize = 128 << 10;
/// Buffers for one request, which takes 1 MiB until it has arrived, and a little more. They stay in
/// use until the disk has completed the first writes.
const POOL_BYTES: usize = (1 << 20) + 2 * WRITE_BYTES;
const WRITE_COUNT: usize = 24;

#[test]
fn writes_succeed_with_full_buffer_pool() {
    draconis_testkit::in_own_process!();
    with_simulated_mount(POOL_BYTES, |kernel, rooms| {
        let file = kernel.create(1, "file").unwrap();
        let piece = |nth: usize| -> Vec<u8> {
            (0..WRITE_BYTES).map(|at| (at * 7 + at / 251 + nth * 31) as u8).collect()
        };
        let (mut with_room, mut without) = (0, 0);
        for nth in 0..WRITE_COUNT {
            let used = rooms.used_bytes();
            let bytes = piece(nth);
            assert_eq!(
                kernel.write(file, (nth * WRITE_BYTES) as u64, &bytes, 0),
                Ok(WRITE_BYTES as u32)
            );
            match rooms.used_bytes() > used {
                true => with_room += 1,
                false => without += 1,
            }
        }
        assert!(with_room > 0 && without > 0, "{with_room} with, {without} without");
        kernel.fsync(file).unwrap();
        for nth in 0..WRITE_COUNT {
            let read = kernel.read(file, (nth * WRITE_BYTES) as u64, WRITE_BYTES as u32).unwrap();
            assert!(read == piece(nth), "{nth}");
        }
    });
}
