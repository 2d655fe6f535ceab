//! Many short lists in one allocation.

/// A list for each number below some count, one behind the other.
#[derive(Debug, Clone)]
pub(crate) struct Lists<T> {
    /// Where each list begins, and where the last one ends.
    starts: Vec<u32>,
    items: Vec<T>,
}

impl<T> Default for Lists<T> {
    fn default() -> Self {
        Self { starts: vec![0], items: Vec::new() }
    }
}

impl<T: Copy> Lists<T> {
    /// The items of each list in the order in which the pairs have them.
    pub(crate) fn of(count: usize, pairs: &[(u32, T)]) -> Self {
        let mut starts = vec![0u32; count + 1];
        pairs.iter().for_each(|(list, _)| starts[*list as usize + 1] += 1);
        for list in 0..count {
            starts[list + 1] += starts[list];
        }
        let Some((_, first)) = pairs.first() else { return Self { starts, items: Vec::new() } };
        let (mut items, mut next) = (vec![*first; pairs.len()], starts.clone());
        for (list, item) in pairs {
            let place = &mut next[*list as usize];
            items[*place as usize] = *item;
            *place += 1;
        }
        Self { starts, items }
    }

    /// A list; one that is not there is empty.
    pub(crate) fn get(&self, list: usize) -> &[T] {
        match self.starts.get(list..list + 2) {
            Some([start, end]) => &self.items[*start as usize..*end as usize],
            _ => &[],
        }
    }
}
