//! Rollback journals, which only ROLLBACK needs: a crash loses the changes that they would undo.
//!
//! Law: a journal lies in memory, and beyond [`MEMORY_BYTES`] in a temporary file without a name.
//! It is never flushed.

use std::fs::File;
use std::os::unix::fs::FileExt;

use draconis_types::lock::Mutex;

use crate::codes;
use crate::error::{Failure, Result};

/// Bytes of a journal that are kept in memory.
const MEMORY_BYTES: u64 = 8 << 20;

/// Contents of a journal.
#[derive(Debug, Default)]
pub(crate) struct Journal(Mutex<Contents>);

#[derive(Debug, Default)]
struct Contents {
    bytes: Vec<u8>,
    /// Has all bytes, once they are more than fit memory.
    file: Option<File>,
    len: u64,
    was_read: bool,
}

impl Journal {
    /// Returns true if the header is valid: a finished journal is empty or begins with zeros.
    pub fn has_valid_header(&self) -> bool {
        let mut first = [0];
        self.0.lock().read(0, &mut first).is_ok_and(|len| len == 1) && first != [0]
    }

    /// Returns true if the owner read the journal since the last call: it rolled back.
    pub fn take_was_read(&self) -> bool {
        std::mem::take(&mut self.0.lock().was_read)
    }

    pub fn read(&self, at: u64, into: &mut [u8], is_owner: bool) -> Result<usize> {
        let mut contents = self.0.lock();
        contents.was_read |= is_owner;
        contents.read(at, into).map_err(|error| to_failure(&error, codes::IOERR_READ))
    }

    pub fn write(&self, at: u64, bytes: &[u8]) -> Result<()> {
        self.0.lock().write(at, bytes).map_err(|error| to_failure(&error, codes::IOERR_WRITE))
    }

    pub fn truncate(&self, len: u64) -> Result<()> {
        self.0.lock().truncate(len).map_err(|error| to_failure(&error, codes::IOERR_WRITE))
    }

    pub fn len(&self) -> u64 {
        self.0.lock().len
    }
}

fn to_failure(error: &std::io::Error, code: codes::Code) -> Failure {
    let code = match error.kind() {
        std::io::ErrorKind::StorageFull => codes::FULL,
        _ => code,
    };
    let directory = std::env::temp_dir();
    Failure::new(code, format!("{}: a rollback journal: {error}", directory.display()))
}

impl Contents {
    fn read(&self, at: u64, into: &mut [u8]) -> std::io::Result<usize> {
        let len = usize::try_from(self.len.saturating_sub(at)).unwrap_or(into.len());
        let len = len.min(into.len());
        let Some(into) = into.get_mut(..len) else { return Ok(0) };
        match &self.file {
            Some(file) => file.read_exact_at(into, at)?,
            None => {
                let from = usize::try_from(at).unwrap_or(usize::MAX);
                let stored = self.bytes.get(from..).and_then(|rest| rest.get(..len));
                into.copy_from_slice(stored.ok_or(std::io::ErrorKind::UnexpectedEof)?);
            }
        }
        Ok(len)
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> std::io::Result<()> {
        let too_long = std::io::ErrorKind::FileTooLarge;
        let end = at.checked_add(bytes.len() as u64).ok_or(too_long)?;
        if self.file.is_none() && end > MEMORY_BYTES {
            let file = tempfile::tempfile()?;
            file.write_all_at(&self.bytes, 0)?;
            self.bytes = vec![];
            self.file = Some(file);
        }
        match &self.file {
            Some(file) => file.write_all_at(bytes, at)?,
            None => {
                let (from, to) = (to_index(at)?, to_index(end)?);
                if self.bytes.len() < to {
                    self.bytes.resize(to, 0);
                }
                self.bytes.get_mut(from..to).ok_or(too_long)?.copy_from_slice(bytes);
            }
        }
        self.len = self.len.max(end);
        Ok(())
    }

    fn truncate(&mut self, len: u64) -> std::io::Result<()> {
        match &self.file {
            Some(file) if len > 0 => file.set_len(len)?,
            Some(_) => self.file = None,
            None if len <= MEMORY_BYTES => self.bytes.resize(to_index(len)?, 0),
            None => return Err(std::io::ErrorKind::FileTooLarge.into()),
        }
        self.len = len;
        Ok(())
    }
}

fn to_index(at: u64) -> std::io::Result<usize> {
    usize::try_from(at).map_err(|_| std::io::ErrorKind::FileTooLarge.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_journals_continue_in_a_file() {
        let journal = Journal::default();
        assert!(!journal.has_valid_header());
        let piece: Vec<u8> = (0..300_000_u32).map(|nth| nth as u8 | 1).collect();
        for nth in 0..40 {
            journal.write(nth * piece.len() as u64, &piece).unwrap();
        }
        assert_eq!(journal.len(), 40 * piece.len() as u64);
        assert!(journal.0.lock().file.is_some() && journal.has_valid_header());
        let mut read = vec![0; piece.len() + 10];
        assert!(!journal.take_was_read());
        let at = 39 * piece.len() as u64;
        assert_eq!(journal.read(at, &mut read, true).unwrap(), piece.len());
        assert!(read.starts_with(&piece) && journal.take_was_read() && !journal.take_was_read());
        journal.truncate(0).unwrap();
        assert!(!journal.has_valid_header() && journal.0.lock().file.is_none());
        journal.write(2, b"x").unwrap();
        assert_eq!((journal.len(), journal.has_valid_header()), (3, false));
    }
}
