//! The only source of chance in a stress run: equal seeds and threads make equal choices.

use vbar::driver::kernel::mix;

/// A generator.
pub(super) struct Choice {
    seed: u64,
    drawn: u64,
}

impl Choice {
    /// The choices of one thread.
    pub(super) fn new(seed: u64, thread: u64) -> Self {
        Self { seed: mix(mix(seed, thread), 0x5EED), drawn: 0 }
    }

    pub(super) fn next(&mut self) -> u64 {
        self.drawn += 1;
        mix(mix(self.seed, self.drawn), self.drawn)
    }

    /// A number below `bound`, which is not 0; the tiny bias of the remainder is accepted.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }

    /// An index of something that has `count`.
    pub(super) fn index(&mut self, count: usize) -> usize {
        self.below(count as u64) as usize
    }

    /// True once in `n` times.
    pub(super) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_seeds_make_equal_choices() {
        let draw = |seed, thread| {
            let mut choice = Choice::new(seed, thread);
            (0..100).map(|_| choice.below(1000)).collect::<Vec<_>>()
        };
        assert_eq!(draw(7, 1), draw(7, 1));
        assert_ne!(draw(7, 1), draw(7, 2));
        assert_ne!(draw(7, 1), draw(8, 1));
    }

    #[test]
    fn choices_are_spread() {
        let mut choice = Choice::new(1, 0);
        let mut counts = [0u32; 10];
        (0..10_000).for_each(|_| counts[choice.index(10)] += 1);
        assert!(counts.iter().all(|count| (850..1150).contains(count)), "{counts:?}");
    }
}
