//! A mount whose buffer pool is exhausted: it copies instead, and loses no data.

#[path = "common/route.rs"]
mod route;

use route::with_mount;

const PIECE: usize = 128 << 10;
/// Buffers for one request, which takes 1 MiB until it has arrived, and a little more. They stay in
/// use until the disk has completed the first writes.
const POOL_BYTES: usize = (1 << 20) + 2 * PIECE;
const PIECES: usize = 24;

#[test]
fn writes_that_find_no_room_arrive_as_those_that_do() {
    with_mount(POOL_BYTES, |kernel, rooms| {
        let file = kernel.create(1, "file").unwrap();
        let piece = |nth: usize| -> Vec<u8> {
            (0..PIECE).map(|at| (at * 7 + at / 251 + nth * 31) as u8).collect()
        };
        let (mut with_room, mut without) = (0, 0);
        for nth in 0..PIECES {
            let used = rooms.used_bytes();
            let bytes = piece(nth);
            assert_eq!(kernel.write(file, (nth * PIECE) as u64, &bytes, 0), Ok(PIECE as u32));
            match rooms.used_bytes() > used {
                true => with_room += 1,
                false => without += 1,
            }
        }
        assert!(with_room > 0 && without > 0, "{with_room} with, {without} without");
        kernel.fsync(file).unwrap();
        for nth in 0..PIECES {
            let read = kernel.read(file, (nth * PIECE) as u64, PIECE as u32).unwrap();
            assert!(read == piece(nth), "{nth}");
        }
    });
}
