//! The front end between a tree in memory and a scripted kernel: requests passed to the tree,
//! replies, and the handling of invalid messages.

mod common;

use common::kernel::*;
use common::recorder::ScriptedLog;
use common::tree::MemoryTree;
use common::{with_kernel, with_kernel_and_log};
use draconis_exchange::contract::request_log::RequestOutcome;
use draconis_types::{CacheValidity, FileType, Refusal};

const EINVAL: i32 = 22;
const EPERM: i32 = 1;
const ENOSYS: i32 = 38;
const ENODATA: i32 = 61;

/// `FOPEN_*` flags.
const FOPEN_DIRECT_IO: u32 = 1;
const FOPEN_KEEP_CACHE: u32 = 2;

/// Flags of a write: it comes from the page cache; it is a direct write.
const FUSE_WRITE_CACHE: u32 = 1;
const FUSE_WRITE_LOCKOWNER: u32 = 2;

#[test]
fn written_bytes_are_read_back() {
    let tree = MemoryTree::new();
    with_kernel(&tree, |kernel| {
        let file = kernel.create(1, "file").unwrap_err();
        assert_eq!(file, ENOSYS, "opening needs no message here, so making does not open");
        let file = tree.add(1, b"file", FileType::File);
        let mut expected = vec![];
        // Some lengths are repeated, so that they are predicted, and others follow.
        for (nth, len) in [1024, 1024, 1024, 1024, 7, 7, 7, 65536, 65536, 65536, 1024, 0, 131_072]
            .into_iter()
            .enumerate()
        {
            let bytes = vec![nth as u8 + 1; len];
            assert_eq!(kernel.write(file, expected.len() as u64, &bytes, 0), Ok(len as u32));
            expected.extend(bytes);
        }
        kernel.fsync(file).unwrap();
        let read = kernel.read(file, 0, 131_072).unwrap();
        assert!(read == expected[..131_072]);
        let len = expected.len();
        assert!(kernel.read(file, len as u64 - 9, 100).unwrap() == expected[len - 9..]);
        assert_eq!(kernel.read(file, len as u64, 100), Ok(vec![]));
        assert_eq!(kernel.read(file, 0, 0), Ok(vec![]));
        assert_eq!(kernel.read(77, 0, 10), Err(2));
        assert_eq!(kernel.read(file, 0, u32::MAX), Err(EINVAL), "more than a request can be");
    });
}

#[test]
fn page_cache_write_is_not_short() {
    let tree = MemoryTree::new();
    let file = tree.add(1, b"file", FileType::File);
    with_kernel(&tree, |kernel| {
        tree.state().max_write_bytes = Some(1000);
        for nth in 0..4u64 {
            let bytes = [nth as u8 + 1; 4096];
            assert_eq!(kernel.write(file, nth * 4096, &bytes, FUSE_WRITE_CACHE), Ok(4096));
            assert_eq!(kernel.write(file, nth * 4096, &bytes, 0), Ok(1000), "told as it is");
        }
        let read = kernel.read(file, 0, 16384).unwrap();
        assert!(read.chunks(4096).zip(1..).all(|(piece, byte)| piece == [byte; 4096]));
        tree.state().max_write_bytes = Some(0);
        assert_eq!(kernel.write(file, 0, &[9; 100], FUSE_WRITE_CACHE), Err(28), "no space");
    });
}

#[test]
fn direct_write_invalidates_pages_before_reply() {
    let tree = MemoryTree::new();
    let file = tree.add(1, b"file", FileType::File);
    with_kernel(&tree, |kernel| {
        kernel.write(file, 0, &[1; 8192], FUSE_WRITE_LOCKOWNER).unwrap();
        assert!(kernel.notices.is_empty(), "there are no pages yet");
        kernel.read(file, 0, 4096).unwrap();
        kernel.write(file, 4096, &[2; 4096], FUSE_WRITE_LOCKOWNER).unwrap();
        let (code, body) = kernel.notices.pop_front().expect("told before the answer");
        assert_eq!(
            (code, u64_at(&body, 0), u64_at(&body, 8), u64_at(&body, 16)),
            (2, file, 4096, 4096)
        );
        // If privileges are cleared, attributes are invalidated as well.
        let kill = 1 << 2;
        kernel.write(file, 0, &[3; 512], FUSE_WRITE_LOCKOWNER | kill).unwrap();
        let told: Vec<_> =
            kernel.notices.drain(..).map(|(_, body)| u64_at(&body, 8) as i64).collect();
        assert_eq!(told, [-1, 0]);
    });
}

/// Encodes a write of `bytes`.
fn write_request(unique: u64, file: u64, offset: u64, bytes: &[u8], flags: u32) -> Vec<u8> {
    let fixed = words_to_bytes(&[bytes.len() as u32, flags, 0, 0, 0, 0]);
    let body = [&[0; 8][..], &offset.to_ne_bytes(), &fixed, bytes].concat();
    encode_request(WRITE, unique, file, &body)
}

#[test]
fn replayed_changes_are_answered() {
    let tree = MemoryTree::new();
    let file = tree.add(1, b"file", FileType::File);
    let flags = {
        let mut body = [0; 40];
        body[12..16].copy_from_slice(&0x4008_6602_u32.to_ne_bytes());
        body[32..36].copy_from_slice(&0x10_u32.to_ne_bytes());
        body
    };
    let xattr = [&words_to_bytes(&[5, 0, 0, 0])[..], b"user.a\0value"].concat();
    let heir = ScriptedLog::with_requests(vec![
        (write_request(2, file, 0, &[1; 8192], 0), None),
        // A direct write beside the pages that the previous write leaves.
        (write_request(4, file, 4096, &[2; 4096], FUSE_WRITE_LOCKOWNER), None),
        (encode_request(SETXATTR, 6, file, &xattr), None),
        (encode_request(IOCTL, 8, file, &flags), None),
        // The original write was short, and the client got that count.
        (
            write_request(10, file, 8192, &[3; 4096], 0),
            Some(RequestOutcome { errno: 0, written_bytes: 1000 }),
        ),
    ]);
    with_kernel_and_log(&tree, &heir, |kernel| {
        for unique in [2_u64, 4, 6, 8, 10] {
            // The kernel resends it; the contents of the request no longer matter.
            kernel.send_bytes(&encode_request(WRITE, unique | 1 << 63, file, &[0; 40]));
            let (answered, answer) = kernel.receive();
            assert_eq!(answered, unique | 1 << 63);
            let written = answer.unwrap().first_chunk().map(|len| u32::from_ne_bytes(*len));
            let expected = match unique {
                2 => Some(8192),
                4 => Some(4096),
                10 => Some(1000),
                6 => None,
                _ => Some(0),
            };
            assert_eq!(written, expected, "request {unique}");
        }
        let told = kernel.notices.drain(..).map(|(code, body)| (code, body.len(), body));
        // One notification requests a resend. Pages are dropped before the reply to the direct
        // write, attributes before that to the flags.
        let told: Vec<_> = told
            .filter(|(_, len, _)| *len > 0)
            .map(|(code, _, body)| (code, u64_at(&body, 8) as i64))
            .collect();
        assert_eq!(told, [(2, 4096), (2, -1)]);
        let read = kernel.read(file, 0, 16384).unwrap();
        assert_eq!(read.len(), 9192);
        assert!(read[..4096] == [1; 4096] && read[4096..8192] == [2; 4096]);
        assert!(read[8192..] == [3; 1000]);
    });
    assert!(heir.contradictions.lock().unwrap().is_empty());
    assert_eq!(heir.decided.lock().unwrap().len(), 4, "that of the last one is known");
}

#[test]
fn failed_replay_is_log_contradiction() {
    let tree = MemoryTree::new();
    let file = tree.add(1, b"file", FileType::File);
    tree.state().max_write_bytes = Some(10);
    let written = |bytes| Some(RequestOutcome { errno: 0, written_bytes: bytes });
    let heir = ScriptedLog::with_requests(vec![
        (write_request(2, file, 0, &[1; 100], 0), written(10)),
        (write_request(4, file, 100, &[1; 100], 0), written(100)),
    ]);
    with_kernel_and_log(&tree, &heir, |kernel| kernel.fsync(file).unwrap());
    let contradictions = heir.contradictions.lock().unwrap();
    assert_eq!(contradictions.len(), 1, "{contradictions:?}");
    assert!(contradictions[0].contains("of 100 bytes that were written only 10"));
}

#[test]
fn direct_write_is_applied_before_reply() {
    let tree = MemoryTree::new();
    let file = tree.add(1, b"file", FileType::File);
    let heir = ScriptedLog::default();
    with_kernel_and_log(&tree, &heir, |kernel| {
        kernel.write(file, 0, &[1; 4096], FUSE_WRITE_LOCKOWNER).unwrap();
        kernel.write(file, 0, &[1; 4096], 0).unwrap();
        // The sync is answered after both.
        kernel.fsync(file).unwrap();
    });
    assert_eq!(heir.done.lock().unwrap().1, 1, "the other's thread does the first one");
    let decided = heir.decided.lock().unwrap();
    assert_eq!(*decided, [RequestOutcome { errno: 0, written_bytes: 4096 }; 2]);
}

#[test]
fn lookup_counts_drop_on_forget() {
    let tree = MemoryTree::new();
    let file = tree.add(1, b"file", FileType::File);
    with_kernel(&tree, |kernel| {
        for _ in 0..2 {
            let entry = kernel.lookup(1, "file").unwrap();
            assert_eq!((u64_at(&entry, 0), u64_at(&entry, 8)), (file, 3));
        }
        let none = kernel.lookup(1, "nothing").unwrap();
        assert_eq!(u64_at(&none, 0), 0, "that there is none may be remembered");
        kernel.send(FORGET, file, &2u64.to_ne_bytes());
        // A forget has no reply; the next request comes after it.
        kernel.call(GETATTR, file, &[0; 16]).unwrap();
    });
    assert_eq!(tree.state().user_counts.get(&file), Some(&0));
}

/// Parses the entries of a READDIRPLUS reply: node of the entry, offset of the next, name.
fn parse_readdirplus(mut bytes: &[u8]) -> Vec<(u64, u64, String)> {
    let mut all = vec![];
    while !bytes.is_empty() {
        let (node, next) = (u64_at(bytes, 0), u64_at(bytes, 128 + 8));
        let name_len = u32_at(bytes, 128 + 16) as usize;
        let name = String::from_utf8(bytes[152..152 + name_len].to_vec()).unwrap();
        all.push((node, next, name));
        bytes = &bytes[(152 + name_len).next_multiple_of(8)..];
    }
    all
}

#[test]
fn readdirplus_resumes_at_cookie_and_references_entries() {
    let tree = MemoryTree::new();
    for nth in 0..40 {
        tree.add(1, format!("name {nth:02}").as_bytes(), FileType::File);
    }
    let mut found = vec![];
    with_kernel(&tree, |kernel| {
        let mut offset = 0u64;
        loop {
            let fixed = words_to_bytes(&[1000, 0, 0, 0, 0, 0]);
            let body = [&[0; 8][..], &offset.to_ne_bytes(), &fixed].concat();
            let answer = kernel.call(READDIRPLUS, 1, &body).unwrap();
            assert!(answer.len() <= 1000);
            let Some((_, next, _)) = parse_readdirplus(&answer).last().cloned() else { break };
            offset = next;
            found.extend(parse_readdirplus(&answer));
        }
    });
    let names: Vec<_> = found.iter().map(|(_, _, name)| name.clone()).collect();
    let expected: Vec<_> = [".", ".."]
        .into_iter()
        .map(String::from)
        .chain((0..40).map(|nth| format!("name {nth:02}")))
        .collect();
    assert_eq!(names, expected);
    let state = tree.state();
    for (node, _, name) in &found {
        let held = if name.starts_with('.') { 0 } else { *node };
        assert_eq!(
            state.user_counts.get(&held).copied().unwrap_or(0),
            i64::from(held != 0),
            "{name}"
        );
    }
}

#[test]
fn open_reply_sets_cache_flags() {
    let tree = MemoryTree::new();
    let file = tree.add(1, b"file", FileType::File);
    let open =
        |kernel: &mut ScriptedKernel| kernel.call(OPEN, file, &[0; 8]).map(|it| u32_at(&it, 8));
    with_kernel(&tree, |kernel| {
        assert_eq!(open(kernel), Err(ENOSYS), "never again");
        for (kept, flags) in [
            (CacheValidity::Valid, FOPEN_KEEP_CACHE),
            (CacheValidity::Stale, 0),
            (CacheValidity::Never, FOPEN_DIRECT_IO),
        ] {
            tree.state().open_result = Some(Ok(kept));
            assert_eq!(open(kernel).map(|it| it & (FOPEN_KEEP_CACHE | FOPEN_DIRECT_IO)), Ok(flags));
        }
        tree.state().open_result = Some(Err(Refusal::NotPermitted));
        assert_eq!(open(kernel), Err(EPERM));
        tree.state().open_result = Some(Ok(CacheValidity::Valid));
        let made = kernel.create(1, "made").unwrap();
        assert_eq!(tree.state().nodes[&1].names[&b"made"[..]], made);
        assert_eq!(kernel.create(1, "made"), Ok(made), "not exclusive");
    });
}

#[test]
fn xattrs_are_read_with_requested_size() {
    let tree = MemoryTree::new();
    let file = tree.add(1, b"file", FileType::File);
    let get = |kernel: &mut ScriptedKernel, name: &str, room: u32| {
        kernel.call(
            GETXATTR,
            file,
            &[&words_to_bytes(&[room, 0])[..], name.as_bytes(), b"\0"].concat(),
        )
    };
    with_kernel(&tree, |kernel| {
        let value = vec![7; 5000];
        let fixed = words_to_bytes(&[value.len() as u32, 0, 0, 0]);
        let body = [&fixed[..], b"user.long\0", &value].concat();
        assert_eq!(kernel.call(SETXATTR, file, &body), Ok(vec![]));
        assert_eq!(get(kernel, "user.long", 0).map(|it| u32_at(&it, 0)), Ok(5000));
        assert_eq!(get(kernel, "user.long", 5000), Ok(value));
        assert_eq!(get(kernel, "user.long", 4999), Err(34));
        assert_eq!(get(kernel, "user.none", 10), Err(ENODATA));
        let beyond = [&words_to_bytes(&[9000, 0, 0, 0])[..], b"user.a\0", b"value"].concat();
        assert_eq!(kernel.call(SETXATTR, file, &beyond), Err(EINVAL));
    });
}

#[test]
fn setflags_invalidates_kernel_attributes() {
    let tree = MemoryTree::new();
    let file = tree.add(1, b"file", FileType::File);
    with_kernel(&tree, |kernel| {
        let ioctl =
            |command: u32, flags: u32| words_to_bytes(&[0, 0, 0, command, 0, 0, 4, 4, flags]);
        kernel.call(IOCTL, file, &ioctl(0x4008_6602, 0x10)).unwrap();
        assert_eq!(
            kernel.notices.pop_front().map(|(code, body)| (code, u64_at(&body, 0))),
            Some((2, file))
        );
        let told = kernel.call(IOCTL, file, &ioctl(0x8008_6601, 0)).unwrap();
        assert_eq!(u32_at(&told, 16), 0x10);
    });
    assert_eq!(tree.state().nodes[&file].flags, 0x10);
}

#[test]
fn init_negotiates_common_features() {
    with_kernel(&MemoryTree::new(), |kernel| {
        let all = words_to_bytes(&[7, 41, 1 << 17, u32::MAX, u32::MAX]);
        let body = [&all[..], &[0; 44]].concat();
        let answer = kernel.call(INIT, 0, &body).unwrap();
        assert_eq!((u32_at(&answer, 0), answer.len()), (7, 64));
        let none = [&words_to_bytes(&[7, 41, 1 << 17, 0, 0])[..], &[0; 44]].concat();
        assert_eq!(kernel.call(INIT, 0, &none).map(|it| u32_at(&it, 12)), Ok(0));
    });
}

/// Returns pseudorandom numbers from a seed.
fn next_random(seed: &mut u64) -> u64 {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    *seed
}

#[test]
fn malformed_messages_do_not_crash_server() {
    let tree = MemoryTree::new();
    let file = tree.add(1, b"file", FileType::File);
    // Only requests that always have a reply.
    let asked = [LOOKUP, GETATTR, MKDIR, UNLINK, OPEN, READ, FSYNC, SETXATTR, GETXATTR];
    let more = [INIT, OPENDIR, CREATE, IOCTL, READDIRPLUS];
    let opcodes: Vec<u32> = asked.into_iter().chain(more).collect();
    with_kernel(&tree, |kernel| {
        let mut seed = 0x9e37_79b9_7f4a_7c15;
        for nth in 0..3000 {
            let opcode = opcodes[next_random(&mut seed) as usize % opcodes.len()];
            let len = next_random(&mut seed) as usize % 120;
            let body: Vec<u8> =
                (0..len)
                    .map(|_| {
                        if next_random(&mut seed) & 1 == 0 {
                            0
                        } else {
                            next_random(&mut seed) as u8
                        }
                    })
                    .collect();
            let node = next_random(&mut seed) % 4;
            kernel.send_bytes(&encode_request(opcode, nth * 2 + 2, node, &body));
            // A message that is shorter than its header or its length field may stay unanswered,
            // but the next one is answered.
            if nth % 100 == 0 {
                kernel
                    .send_bytes(&encode_request(opcode, 1, node, &[])[..(nth / 100) as usize + 1]);
            }
            let sent = u64::MAX - nth * 2;
            kernel.send_bytes(&encode_request(GETATTR, sent, file, &[0; 16]));
            let answer = loop {
                match kernel.receive() {
                    (unique, answer) if unique == sent => break answer,
                    _ => {}
                }
            };
            assert_eq!(answer.map(|it| it.len()), Ok(104));
        }
        // Writes with wrong lengths among those that are predicted.
        for len in [1024u32, 1024, 1024, 5, 2000, u32::MAX] {
            let fixed = words_to_bytes(&[len, 0, 0, 0, 0, 0]);
            let body = [&[0; 16][..], &fixed, &[1; 1024]].concat();
            let answer = kernel.call(WRITE, file, &body);
            assert_eq!(answer.is_ok(), len <= 1024, "{len}: {answer:?}");
        }
    });
}
