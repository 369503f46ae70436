//! Files in memory with fixed delays: a known result for checking the lab
//! itself.
//!
//! `delay:read=1ms,write=200us,sync=5ms`; with `,clock=model` in modelled time that
//! advances by the delays only.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use draconis_testkit::sim;

use super::memory::MemoryFiles;
use super::{OpenMode, Subject, SubjectFile, SubjectFiles, SubjectKind};
use crate::clock::{Clock, WallClock};

/// Files with fixed delays.
pub struct DelaySubject {
    delays: DelayTimes,
    files: Arc<MemoryFiles>,
    wall: Arc<WallClock>,
}

#[derive(Clone, Default)]
struct DelayTimes {
    read: Duration,
    write: Duration,
    sync: Duration,
    model: Option<sim::Clock>,
}

impl DelaySubject {
    /// Parses a specification.
    ///
    /// # Errors
    /// The specification is invalid.
    pub fn new(spec: &str) -> anyhow::Result<Self> {
        let mut delays = DelayTimes::default();
        for part in spec.split(',').filter(|part| !part.is_empty()) {
            let (key, value) = part.split_once('=').with_context(|| format!("delay: {part}"))?;
            match key {
                "read" => delays.read = parse_duration(value)?,
                "write" => delays.write = parse_duration(value)?,
                "sync" => delays.sync = parse_duration(value)?,
                "clock" if value == "model" => delays.model = Some(sim::Clock::new()),
                _ => bail!("delay: {part}: read, write, sync or clock=model"),
            }
        }
        Ok(Self { delays, files: Arc::default(), wall: Arc::new(WallClock::new()) })
    }
}

fn parse_duration(text: &str) -> anyhow::Result<Duration> {
    let digits = text.trim_end_matches(|c: char| c.is_alphabetic());
    let number: f64 = digits.parse().with_context(|| format!("delay: {text}"))?;
    let nanoseconds = match &text[digits.len()..] {
        "ns" => 1.0,
        "us" => 1e3,
        "ms" => 1e6,
        "s" => 1e9,
        other => bail!("delay: {other}: ns, us, ms or s"),
    };
    Ok(Duration::from_nanos((number * nanoseconds) as u64))
}

impl DelayTimes {
    /// Busy-waits, because sleeping would add the time of a wake-up.
    fn wait_delay(&self, delay: Duration) {
        if let Some(model) = &self.model {
            return model.advance(delay.as_nanos() as u64);
        }
        let until = Instant::now() + delay;
        while Instant::now() < until {
            std::hint::spin_loop();
        }
    }
}

impl Subject for DelaySubject {
    fn name(&self) -> String {
        "delay".into()
    }

    fn describe(&self) -> String {
        let DelayTimes { read, write, sync, .. } = &self.delays;
        format!("memory with delays: read {read:?}, write {write:?}, sync {sync:?}")
    }

    fn kind(&self) -> SubjectKind {
        SubjectKind::Memory
    }

    fn clock(&self) -> Arc<dyn Clock> {
        match &self.delays.model {
            Some(model) => Arc::new(model.clone()),
            None => self.wall.clone(),
        }
    }

    fn files(&self) -> anyhow::Result<Arc<dyn SubjectFiles>> {
        Ok(Arc::new(DelayFiles { delays: self.delays.clone(), files: self.files.clone() }))
    }
}

struct DelayFiles {
    delays: DelayTimes,
    files: Arc<MemoryFiles>,
}

struct DelayHandle {
    delays: DelayTimes,
    inner: Arc<dyn SubjectFile>,
}

impl DelayFiles {
    fn wrap(&self, inner: Arc<dyn SubjectFile>) -> Arc<dyn SubjectFile> {
        Arc::new(DelayHandle { delays: self.delays.clone(), inner })
    }
}

impl SubjectFiles for DelayFiles {
    fn create(
        &self,
        name: &str,
        bytes: u64,
        how: OpenMode,
    ) -> anyhow::Result<Arc<dyn SubjectFile>> {
        Ok(self.wrap(self.files.create(name, bytes, how)?))
    }

    fn open(&self, name: &str, how: OpenMode) -> anyhow::Result<Arc<dyn SubjectFile>> {
        Ok(self.wrap(self.files.open(name, how)?))
    }

    fn remove(&self, name: &str) -> anyhow::Result<()> {
        self.files.remove(name)
    }
}

impl SubjectFile for DelayHandle {
    fn read(&self, at: u64, into: &mut [u8]) -> anyhow::Result<usize> {
        self.delays.wait_delay(self.delays.read);
        self.inner.read(at, into)
    }

    fn write(&self, at: u64, bytes: &[u8]) -> anyhow::Result<()> {
        self.delays.wait_delay(self.delays.write);
        self.inner.write(at, bytes)
    }

    fn sync(&self) -> anyhow::Result<()> {
        self.delays.wait_delay(self.delays.sync);
        self.inner.sync()
    }
}
