//! Releases that words of memory carry, and who acquires them.

use std::sync::Arc;

use super::{
    access::{ACQUIRE, Access, READ, RELEASE, STRONG, WRITE, scope_of},
    grids::{Place, SYSTEM, Scope},
    order,
    shadow::{GRANULE, Locked, WORD},
    threads::{Block, Knowledge, Message},
};
use crate::memory;

impl Block {
    /// Acquires what the words carry, and lets them carry what this access releases.
    pub(super) fn synchronise(
        &mut self,
        locked: &mut Locked,
        at: usize,
        bytes: usize,
        access: Access,
        seen: u8,
        own: u8,
    ) {
        let words = (at % GRANULE / WORD)..(at % GRANULE + bytes).div_ceil(WORD);
        let mask = words.clone().fold(0u8, |mask, word| mask | 1 << word);
        let place = self.place;
        let (messages, key) = locked.messages();
        if access.is(READ) && access.is(STRONG) && seen != 0 {
            for (of, message) in messages.get(&key).into_iter().flatten() {
                if of & mask & seen != 0 {
                    self.acquire(message, &access);
                }
            }
        }
        if !access.is(WRITE) {
            return;
        }
        let mut carried: Vec<(u8, Message)> = Vec::new();
        if access.is(STRONG) {
            let released = access.is(RELEASE).then(|| Arc::new(self.release()));
            if let Some(released) = &released
                && scope_of(access.what) == SYSTEM
                && memory::is_of_host(at as u64)
            {
                order::released_to_host(released);
            }
            carried
                .extend(self.releases(scope_of(access.what), released, place).map(|message| (mask, message)));
        }
        // A release goes on through atomics, and through later stores of its own thread.
        let goes_on = if access.is(READ) {
            seen
        } else if access.is(STRONG) {
            own
        } else {
            0
        };
        if seen != 0 {
            let old = messages.remove(&key).unwrap_or_default();
            for (of, message) in old {
                let left = of & (!mask | goes_on);
                // Both are acquired together. Threads of one block have one place, so a word has few messages, however many releases.
                let same = |(of, new): &&mut (u8, Message)| {
                    *of == left && (new.scope, new.from) == (message.scope, message.from)
                };
                if let Some((_, new)) = carried.iter_mut().find(same) {
                    Arc::make_mut(&mut new.knowledge).join(&message.knowledge);
                } else if left != 0 {
                    carried.push((left, message));
                }
            }
        } else if let Some(old) = messages.remove(&key) {
            carried.extend(
                old.into_iter()
                    .filter_map(|(of, message)| (of & !mask != 0).then_some((of & !mask, message))),
            );
        }
        let all = carried.iter().fold(0, |all, (of, _)| all | of);
        if !carried.is_empty() {
            messages.insert(key, carried);
        }
        for word in words {
            let writer = &mut locked.cells()[word].writer;
            writer.word = writer.word & !(1 << 62) | u64::from(all >> word & 1) << 62;
        }
    }

    /// A strong load has read a word that carries this.
    pub(super) fn acquire(&mut self, message: &Message, access: &Access) {
        let scope = message.from.scope_with(self.place);
        if message.scope < scope || scope_of(access.what) < scope {
            return;
        }
        let thread = self.current();
        let lane = &mut self.lanes[thread];
        let into = if access.is(ACQUIRE) { &mut lane.known } else { &mut lane.observed[scope] };
        into.join(&message.knowledge);
    }

    /// What a strong store at this scope releases: itself, and by fences before it.
    fn releases(
        &self,
        scope: Scope,
        released: Option<Arc<Knowledge>>,
        from: Place,
    ) -> impl Iterator<Item = Message> + use<> {
        let mut all: Vec<Message> = Vec::new();
        if let Some(knowledge) = released {
            all.push(Message { scope, from, knowledge });
        } else {
            for scope in (0..=scope).rev() {
                if let Some(knowledge) = &self.lanes[self.current()].fences[scope]
                    && !all.last().is_some_and(|last| Arc::ptr_eq(&last.knowledge, knowledge))
                {
                    all.push(Message { scope, from, knowledge: knowledge.clone() });
                }
            }
        }
        all.into_iter()
    }
}
