//! Thread pool for blocking requests.
//!
//! Law 1: jobs run in order, on as many threads as there are jobs, up to a limit.
//! Law 2: no job waits for another.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;

use draconis_types::lock::{Condvar, Mutex};

type Job = Box<dyn FnOnce() + Send>;

pub(crate) struct RequestThreads {
    queue: Mutex<Queue>,
    changed: Condvar,
    max_threads: usize,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    idle: usize,
    is_over: bool,
    threads: Vec<JoinHandle<()>>,
}

impl RequestThreads {
    pub fn new(most: usize) -> Arc<Self> {
        Arc::new(Self {
            queue: Mutex::default(),
            changed: Condvar::new(),
            max_threads: most.max(1),
        })
    }

    pub fn push(self: &Arc<Self>, job: impl FnOnce() + Send + 'static) {
        let mut queue = self.queue.lock();
        queue.jobs.push_back(Box::new(job));
        if queue.idle >= queue.jobs.len() || queue.threads.len() >= self.max_threads {
            self.changed.notify_one();
            return;
        }
        let lanes = self.clone();
        let spawned =
            std::thread::Builder::new().name("bucket".to_owned()).spawn(move || lanes.run_jobs());
        match spawned {
            Ok(thread) => queue.threads.push(thread),
            // Existing threads will run it.
            Err(_) if !queue.threads.is_empty() => {
                self.changed.notify_one();
            }
            Err(error) => {
                log::warn!("no thread for requests: {error}");
                let job = queue.jobs.pop_back();
                drop(queue);
                if let Some(job) = job {
                    job();
                }
            }
        }
    }

    fn run_jobs(&self) {
        let mut queue = self.queue.lock();
        loop {
            if let Some(job) = queue.jobs.pop_front() {
                drop(queue);
                job();
                queue = self.queue.lock();
            } else if queue.is_over {
                return;
            } else {
                queue.idle += 1;
                self.changed.wait(&mut queue);
                queue.idle -= 1;
            }
        }
    }

    /// Waits until all jobs are done; none may be pushed afterwards.
    pub fn finish(&self) {
        let threads = {
            let mut queue = self.queue.lock();
            queue.is_over = true;
            self.changed.notify_all();
            std::mem::take(&mut queue.threads)
        };
        for thread in threads {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    #[test]
    fn all_jobs_finish_within_thread_limit() {
        let lanes = RequestThreads::new(3);
        let counts: Arc<[AtomicU64; 3]> = Arc::default();
        for _ in 0..200 {
            let counts = counts.clone();
            lanes.push(move || {
                let now = counts[0].fetch_add(1, Ordering::SeqCst) + 1;
                counts[1].fetch_max(now, Ordering::SeqCst);
                std::thread::yield_now();
                counts[0].fetch_sub(1, Ordering::SeqCst);
                counts[2].fetch_add(1, Ordering::SeqCst);
            });
        }
        lanes.finish();
        assert_eq!(counts[2].load(Ordering::SeqCst), 200);
        assert!(counts[1].load(Ordering::SeqCst) <= 3);
    }
}
