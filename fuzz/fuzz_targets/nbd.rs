//! Any bytes of an NBD client: from the greeting on, or requests after a usual negotiation.
#![no_main]

use std::sync::Arc;

use draconis_device::MemoryDisk;
use draconis_nbd::{Connection, Export};
use libfuzzer_sys::fuzz_target;

/// Client flags, STRUCTURED_REPLY, SET_META_CONTEXT of base:allocation, GO of the default export.
const USUAL: &[u8] = b"\0\0\0\x03\
    IHAVEOPT\0\0\0\x08\0\0\0\0\
    IHAVEOPT\0\0\0\x0a\0\0\0\x1b\0\0\0\0\0\0\0\x01\0\0\0\x0fbase:allocation\
    IHAVEOPT\0\0\0\x07\0\0\0\x06\0\0\0\0\0\0";

/// The same with EXTENDED_HEADERS.
const EXTENDED: &[u8] = b"\0\0\0\x03\
    IHAVEOPT\0\0\0\x0b\0\0\0\0\
    IHAVEOPT\0\0\0\x0a\0\0\0\x1b\0\0\0\0\0\0\0\x01\0\0\0\x0fbase:allocation\
    IHAVEOPT\0\0\0\x07\0\0\0\x06\0\0\0\0\0\0";

fuzz_target!(|bytes: &[u8]| {
    let Some((first, rest)) = bytes.split_first() else { return };
    let input = match first & 3 {
        0 => rest.to_vec(),
        1 | 2 => [USUAL, rest].concat(),
        _ => [EXTENDED, rest].concat(),
    };
    let disk = Arc::new(MemoryDisk::new(vec![1; 1 << 16], 512));
    let exports = [Export::new("a".to_owned(), String::new(), disk)];
    let mut connection = Connection::new(&input[..], std::io::sink());
    if let Ok(Some(session)) = connection.negotiate(&exports) {
        let _ = connection.transmit(&session);
    }
});
