/** The client of @hey-api/openapi-ts runs a session, a pause, its activation down and up, a resume, and each chat API. */
import { deepStrictEqual as equal, ok } from 'node:assert';

import * as djinn from './hey';
import { client } from './hey/client.gen';

async function main(): Promise<void> {
    client.setConfig({ baseUrl: process.argv[2], throwOnError: true });
    const { data: session } = await djinn.createSession<true>();
    const path = { session_id: session.id };
    const armed = await djinn.createBreakpoint<true>({ path, body: { layer: 1, action: 'pause', once: true } });
    equal(armed.data.layers, [1]);

    const prompt = { token_ids: [5, 6, 7], max_tokens: 4, ignore_eos: true };
    const { data: paused } = await djinn.generate<true>({ path, body: prompt });
    equal([paused.status, paused.checkpoint?.layer, paused.finish_reason], ['paused', 1, null]);
    const { data: activation } = await djinn.getActivation<true>({ path });
    equal((await djinn.putActivation<true>({ path, body: activation })).data.shape, paused.checkpoint?.shape);

    const edits = [{ op: 'scale', factor: 1, positions: 'last' } as const];
    const { data: finished } = await djinn.resumeSession<true>({ path, body: { edits, until: 'end' } });
    equal([finished.status, finished.token_ids.length, finished.finish_reason], ['finished', 4, 'length']);

    const model = (await djinn.listModels<true>()).data.data[0].id;
    const greedy = { model, temperature: 0, ignore_eos: true };
    const messages = [{ role: 'user' as const, content: 'Hello' }];
    const { data: answer } = await djinn.createChatCompletion<true>({ body: { ...greedy, messages, max_tokens: 4 } });
    equal(answer.usage.completion_tokens, 4);
    const text = answer.choices[0].message.content;
    ok(text);

    const input = { ...greedy, input: messages, max_output_tokens: 4 };
    const { data: response } = await djinn.createResponse<true>({ body: input });
    const said = response.output.flatMap((item) => (item.type === 'message' ? item.content : []));
    equal(said.map((part) => part.type === 'output_text' && part.text), [text]);
    equal((await djinn.getResponse<true>({ path: { response_id: response.id } })).data, response);

    const { data: message } = await djinn.createMessage<true>({ body: { ...greedy, messages, max_tokens: 4 } });
    equal(message.content.map((block) => block.type === 'text' && block.text), [text]);
}

main().catch((error) => {
    console.error(error);
    process.exitCode = 1;
});
