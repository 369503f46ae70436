//! Descriptor chains of a split ring.

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::error::RingError;
use crate::memory::{Segment, total_len};

const DESCRIPTOR_BYTES: u64 = 16;
/// Maximum number of descriptors of an indirect table. It may exceed the size of the ring.
const MAX_INDIRECT: u32 = 2 * crate::MAX_QUEUE_SIZE as u32;

const NEXT: u16 = virtio_bindings::virtio_ring::VRING_DESC_F_NEXT as u16;
const WRITE: u16 = virtio_bindings::virtio_ring::VRING_DESC_F_WRITE as u16;
const INDIRECT: u16 = virtio_bindings::virtio_ring::VRING_DESC_F_INDIRECT as u16;

struct Descriptor {
    at: u64,
    len: u32,
    flags: u16,
    next: u16,
}

fn read_descriptor(
    memory: &GuestMemoryMmap,
    table: u64,
    index: u16,
) -> Result<Descriptor, RingError> {
    let at = table.checked_add(u64::from(index) * DESCRIPTOR_BYTES).ok_or(RingError::Memory)?;
    let raw: [u8; 16] = memory.read_obj(GuestAddress(at))?;
    let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = raw;
    Ok(Descriptor {
        at: u64::from_le_bytes([a, b, c, d, e, f, g, h]),
        len: u32::from_le_bytes([i, j, k, l]),
        flags: u16::from_le_bytes([m, n]),
        next: u16::from_le_bytes([o, p]),
    })
}

/// A chain, copied: what the guest writes to the ring later has no effect.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Chain {
    pub(crate) head: u16,
    /// What the device reads.
    pub(crate) readable: Vec<Segment>,
    /// What the device writes.
    pub(crate) writable: Vec<Segment>,
}

/// Reads the chain that starts at `head` in a table of `size` descriptors.
///
/// # Errors
/// A loop, an index outside the table, an indirect table in an indirect one, memory that does not
/// exist, more than 4 GiB, or a part to be read after one to be written.
pub(crate) fn read_chain(
    memory: &GuestMemoryMmap,
    table: u64,
    size: u16,
    head: u16,
) -> Result<Chain, RingError> {
    let mut chain = Chain { head, readable: vec![], writable: vec![] };
    let (mut table, mut size, mut is_indirect) = (table, size, false);
    let (mut index, mut steps) = (head, 0);
    loop {
        if index >= size {
            return Err(RingError::Chain("a descriptor outside its table"));
        }
        if steps >= size {
            return Err(RingError::Chain("a loop"));
        }
        steps += 1;
        let descriptor = read_descriptor(memory, table, index)?;
        if descriptor.flags & INDIRECT != 0 {
            let count = descriptor.len / DESCRIPTOR_BYTES as u32;
            let is_whole = u64::from(descriptor.len).is_multiple_of(DESCRIPTOR_BYTES);
            if is_indirect || descriptor.flags & NEXT != 0 {
                return Err(RingError::Chain("an indirect table at the wrong place"));
            }
            if !is_whole || count == 0 || count > MAX_INDIRECT {
                return Err(RingError::Chain("an indirect table of the wrong length"));
            }
            (table, size, is_indirect) = (descriptor.at, count as u16, true);
            (index, steps) = (0, 0);
            continue;
        }
        let segment = Segment { at: descriptor.at, len: descriptor.len };
        if segment.len > 0 && !segment.is_in(memory) {
            return Err(RingError::Memory);
        }
        if descriptor.flags & WRITE != 0 {
            chain.writable.push(segment);
        } else if chain.writable.is_empty() {
            chain.readable.push(segment);
        } else {
            return Err(RingError::Chain("a part to be read after one to be written"));
        }
        if descriptor.flags & NEXT == 0 {
            break;
        }
        index = descriptor.next;
    }
    if total_len(&chain.readable) + total_len(&chain.writable) > u64::from(u32::MAX) {
        return Err(RingError::Chain("more than 4 GiB"));
    }
    chain.readable.retain(|segment| segment.len > 0);
    chain.writable.retain(|segment| segment.len > 0);
    Ok(chain)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Address, length, flags, next.
    type Raw = (u64, u32, u16, u16);

    fn memory(tables: &[(u64, &[Raw])]) -> GuestMemoryMmap {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 16)]).unwrap();
        for (start, table) in tables {
            for (nth, (at, len, flags, next)) in table.iter().enumerate() {
                let raw = [&at.to_le_bytes()[..], &len.to_le_bytes(), &flags.to_le_bytes()];
                let raw = [raw.concat(), next.to_le_bytes().to_vec()].concat();
                memory.write_slice(&raw, GuestAddress(start + 16 * nth as u64)).unwrap();
            }
        }
        memory
    }

    #[test]
    fn chains_are_read() {
        let direct: &[_] =
            &[(0x1000, 16, NEXT, 2), (0x8000, 64, INDIRECT, 0), (0x3000, 7, WRITE, 0)];
        let indirect: &[_] =
            &[(0x1000, 16, NEXT, 1), (0x1100, 0, NEXT, 3), (0, 0, 0, 0), (0x2000, 5, WRITE, 0)];
        let memory = memory(&[(0, direct), (0x8000, indirect)]);
        let chain = read_chain(&memory, 0, 4, 0).unwrap();
        assert_eq!(chain.readable, [Segment { at: 0x1000, len: 16 }]);
        assert_eq!(chain.writable, [Segment { at: 0x3000, len: 7 }]);
        let chain = read_chain(&memory, 0, 4, 1).unwrap();
        assert_eq!(chain.readable, [Segment { at: 0x1000, len: 16 }]);
        assert_eq!(chain.writable, [Segment { at: 0x2000, len: 5 }]);
    }

    #[test]
    fn broken_chains_are_refused() {
        let table: &[_] = &[
            (0x1000, 16, NEXT, 0),
            (0x1000, 16, NEXT, 9),
            (0x1000, 16, WRITE | NEXT, 3),
            (0x1000, 16, 0, 0),
            (0xfff0, 17, 0, 0),
            (0x8000, 32, INDIRECT | NEXT, 3),
            (0x8000, 17, INDIRECT, 0),
            (0x8000, 0, INDIRECT, 0),
            (0x8000, u32::MAX - 15, INDIRECT, 0),
            (u64::MAX - 15, 16, INDIRECT, 0),
            (0x8000, 32, INDIRECT, 0),
            (u64::MAX, 2, 0, 0),
        ];
        let nested: &[_] = &[(0x8000, 16, INDIRECT, 0), (0, 0, 0, 0)];
        let memory = memory(&[(0, table), (0x8000, nested)]);
        for head in [0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, u16::MAX] {
            assert!(read_chain(&memory, 0, 12, head).is_err(), "{head}");
        }
        assert!(read_chain(&memory, 0, 12, 3).is_ok());
        assert!(read_chain(&memory, 0xfff8, 12, 3).is_err());
        assert!(read_chain(&memory, u64::MAX - 8, 12, 3).is_err());
    }
}
