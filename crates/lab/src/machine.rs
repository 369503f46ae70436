//! What a number was measured on.

use serde::Serialize;

/// The machine, and how busy it is.
#[derive(Debug, Serialize)]
pub struct Machine {
    date: String,
    cpu: String,
    cpus: usize,
    memory_mib: u64,
    kernel: String,
    load: String,
}

impl Machine {
    /// Looks around.
    pub fn look() -> Self {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let after = |text: &str, key: &str| {
            let line = text.lines().find(|line| line.starts_with(key));
            line.and_then(|line| line.split_once(':')).map(|(_, v)| v.trim().to_string())
        };
        let memory = after(&read("/proc/meminfo"), "MemTotal").unwrap_or_default();
        let kib: u64 = memory.split(' ').next().and_then(|n| n.parse().ok()).unwrap_or(0);
        Self {
            date: jiff::Zoned::now().strftime("%Y-%m-%d %H:%M").to_string(),
            cpu: after(&read("/proc/cpuinfo"), "model name").unwrap_or_else(|| "unknown".into()),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            memory_mib: kib / 1024,
            kernel: read("/proc/sys/kernel/osrelease").trim().to_string(),
            load: read("/proc/loadavg").split(' ').next().unwrap_or_default().to_string(),
        }
    }
}

impl std::fmt::Display for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{}; {} x {}, {} MiB, Linux {}; load before {}",
            self.date, self.cpus, self.cpu, self.memory_mib, self.kernel, self.load
        )
    }
}
