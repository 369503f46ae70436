//! Real and modelled time, and a stopwatch with little overhead.

use std::time::Instant;

use draconis_testkit::sim;

/// A source of time.
pub trait Clock: Send + Sync {
    /// Returns the nanoseconds since a fixed time.
    fn now_ns(&self) -> u64;
}

/// The monotonic clock of the machine.
pub struct WallClock(Instant);

impl WallClock {
    /// Creates a clock that starts now.
    pub fn new() -> Self {
        Self(Instant::now())
    }
}

impl Clock for WallClock {
    fn now_ns(&self) -> u64 {
        self.0.elapsed().as_nanos() as u64
    }
}

impl Clock for sim::Clock {
    fn now_ns(&self) -> u64 {
        sim::Clock::now_ns(self)
    }
}

/// Times consecutive steps, with one clock read each.
pub struct Stopwatch<'a> {
    clock: &'a dyn Clock,
    last_ns: u64,
}

impl<'a> Stopwatch<'a> {
    /// Starts the stopwatch.
    pub fn start(clock: &'a dyn Clock) -> Self {
        Self { clock, last_ns: clock.now_ns() }
    }

    /// Returns the nanoseconds since the start or the last lap.
    pub fn lap_ns(&mut self) -> u64 {
        let now = self.clock.now_ns();
        let lap = now.saturating_sub(self.last_ns);
        self.last_ns = now;
        lap
    }
}

/// Measures the cost of one lap in nanoseconds: the minimum of many batches, because other load
/// only adds time.
pub fn measure_lap_cost_ns() -> f64 {
    const LAPS_PER_BATCH: u32 = 10_000;
    let clock = WallClock::new();
    let batch = || {
        let mut watch = Stopwatch::start(&clock);
        let started = clock.now_ns();
        for _ in 0..LAPS_PER_BATCH {
            std::hint::black_box(watch.lap_ns());
        }
        (clock.now_ns() - started) as f64 / f64::from(LAPS_PER_BATCH)
    };
    (0..20).map(|_| batch()).fold(f64::INFINITY, f64::min)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn laps_sum_to_total() {
        let clock = sim::Clock::new();
        let mut watch = Stopwatch::start(&clock);
        clock.advance(5);
        assert_eq!(watch.lap_ns(), 5);
        clock.advance_to(3);
        assert_eq!(watch.lap_ns(), 0);
        clock.advance_to(25);
        assert_eq!(watch.lap_ns(), 20);
    }

    /// Prints the cost; the asserted bound is that of a debug build under load.
    #[test]
    fn lap_cost_is_small() {
        let cost = measure_lap_cost_ns();
        println!("one lap of the stopwatch: {cost:.1} ns");
        assert!(cost < 5_000.0);
    }
}
