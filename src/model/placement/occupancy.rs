//! Frames in use at each step of a cycle, with the most over a stretch of steps in O(log n).

/// Numbers by step, all 0 at first; stretches may run across the end of the cycle.
#[derive(Clone, Debug)]
pub(super) struct Occupancy {
    steps: usize,
    /// A tree of maxima in heap order: a node's own number holds for all steps below it.
    most: Vec<i64>,
    own: Vec<i64>,
}

impl Occupancy {
    pub(super) fn new(steps: usize) -> Self {
        let nodes = 2 * steps.next_power_of_two().max(1);
        Self { steps, most: vec![0; nodes], own: vec![0; nodes] }
    }

    /// Adds to the steps from `first` up to, not including, `end`: at most one cycle of them.
    pub(super) fn add(&mut self, first: usize, end: usize, number: i64) {
        for (first, end) in self.pieces(first, end) {
            self.add_below(1, (0, self.most.len() / 2), (first, end), number);
        }
    }

    /// The most over the same; `i64::MIN` of no steps.
    pub(super) fn most(&self, first: usize, end: usize) -> i64 {
        let pieces = self.pieces(first, end).into_iter();
        let most = pieces.map(|piece| self.most_below(1, (0, self.most.len() / 2), piece));
        most.max().unwrap_or(i64::MIN)
    }

    fn pieces(&self, first: usize, end: usize) -> [(usize, usize); 2] {
        let length = end.saturating_sub(first).min(self.steps);
        let first = if self.steps == 0 { 0 } else { first % self.steps };
        let behind = (first + length).saturating_sub(self.steps);
        [(first, first + length - behind), (0, behind)]
    }

    fn add_below(
        &mut self,
        node: usize,
        (low, high): (usize, usize),
        (first, end): (usize, usize),
        number: i64,
    ) {
        if first >= high || end <= low || first >= end {
            return;
        }
        if first <= low && high <= end {
            self.own[node] += number;
            self.most[node] += number;
            return;
        }
        let middle = usize::midpoint(low, high);
        self.add_below(2 * node, (low, middle), (first, end), number);
        self.add_below(2 * node + 1, (middle, high), (first, end), number);
        self.most[node] = self.own[node] + self.most[2 * node].max(self.most[2 * node + 1]);
    }

    fn most_below(
        &self,
        node: usize,
        (low, high): (usize, usize),
        (first, end): (usize, usize),
    ) -> i64 {
        if first >= high || end <= low || first >= end {
            return i64::MIN;
        }
        if first <= low && high <= end {
            return self.most[node];
        }
        let middle = usize::midpoint(low, high);
        let left = self.most_below(2 * node, (low, middle), (first, end));
        let right = self.most_below(2 * node + 1, (middle, high), (first, end));
        self.own[node].saturating_add(left.max(right))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_over_stretches_is_that_of_plain_numbers() {
        let steps = 13;
        let (mut tree, mut plain) = (Occupancy::new(steps), vec![0i64; steps]);
        let mut number = 7usize;
        for _ in 0..500 {
            number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let (first, length) = ((number >> 33) % steps, (number >> 40) % (steps + 1));
            let added = (number >> 50) as i64 % 5 - 2;
            tree.add(first, first + length, added);
            (first..first + length).for_each(|step| plain[step % steps] += added);
            let (first, length) = ((number >> 20) % steps, (number >> 27) % (steps + 1));
            let most = (first..first + length).map(|step| plain[step % steps]).max();
            assert_eq!(tree.most(first, first + length), most.unwrap_or(i64::MIN));
        }
    }
}
